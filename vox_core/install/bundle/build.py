"""A bundle file made: a wheel of each distribution found, built or fetched with uv, and packed."""

from __future__ import annotations

import hashlib
import shutil
import ssl
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from vox_core.catalog import Catalog, objections
from vox_core.errors import BackendError, InputError, PluginError, WorkError
from vox_core.install.bundle.apply import platform_name
from vox_core.install.bundle.archive import ANY, About, Bundle, Part, Wheel, parts_of, write
from vox_core.install.environment import CORE, Environment, local_path
from vox_core.install.plan import file_name
from vox_core.install.uv import ONLY_WHEELS, Uv, run

if TYPE_CHECKING:
    from packaging.pylock import PackageArchive, PackageWheel

# Wheels of setuptools carry times; this is the earliest that zip can tell.
_REPRODUCIBLE = {"SOURCE_DATE_EPOCH": "315532800"}


def build(
    bundle_id: str,
    catalog: Catalog,
    out: Path,
    *,
    wheel_folders: Sequence[Path] = (),
    with_dependencies: bool = False,
    isolation: bool = True,
) -> Bundle:
    """Make the bundle file `out`, for this platform and this Python.

    Args:
        wheel_folders: searched for wheels before the catalog's sources are built or fetched.
        with_dependencies: add all that the distributions need, as uv resolves it.
        isolation: build wheels in environments of their own.

    Raises:
        ConfigError: C007, there is no such bundle.
        BackendError: B009, B010; all faults at once.
        PluginError: X003, a wheel could not be built or fetched.
        StorageError: an I/O error.
    """
    parts = parts_of(bundle_id, catalog)
    _require_possible(bundle_id, catalog)
    with tempfile.TemporaryDirectory(prefix="vox-bundle-") as scratch:
        maker = _Maker(Path(scratch), wheel_folders, isolation)
        made = maker.gather(parts)
        _require_wanted(parts, made)
        if with_dependencies:
            made |= maker.closure(made)
        about = _describe(bundle_id, catalog, made, with_dependencies)
        write(out, about, made)
    return Bundle(out, about, tuple(sorted(made, key=lambda wheel: wheel.name)))


class _Maker:
    """Makes wheels below a scratch folder."""

    def __init__(self, scratch: Path, folders: Sequence[Path], isolation: bool) -> None:
        self.scratch, self.folders, self.isolation = scratch, folders, isolation
        self.uv = Uv(Environment.here())
        links = [
            self.uv.environ.get("UV_FIND_LINKS", ""),
            *(str(each.absolute()) for each in folders),
        ]
        self.uv.environ["UV_FIND_LINKS"] = ",".join(filter(None, links))

    def gather(self, parts: Mapping[str, Part]) -> dict[Wheel, Path]:
        """A wheel of each part, out of the folders or from its source."""
        found = {name: _best_wheel(name, part, self.folders) for name, part in parts.items()}
        lacking = [part for name, part in parts.items() if found[name] is None]
        if faults := [
            f"{part.distribution}: {path} is not there"
            for part in lacking
            if (path := part.source.path) is not None and not path.exists()
        ]:
            raise BackendError(
                "B010",
                "the bundle cannot be built: sources are missing",
                faults=faults,
                remedy="build it in a checkout of vox, or name folders with wheels: --wheels DIR",
            )
        made = [self._make(part, self.scratch / str(n)) for n, part in enumerate(lacking)]
        return {Wheel.of(path): path for path in (*found.values(), *made) if path is not None}

    def closure(self, own: Mapping[Wheel, Path]) -> dict[Wheel, Path]:
        """Wheels of what the bundle's own wheels need, without these."""
        pins = [f"{wheel.name} @ {path.absolute().as_uri()}" for wheel, path in own.items()]
        names = {wheel.name for wheel in own}
        paths = self._fetch(pins, [], self.scratch / "closure", but=names)
        return {Wheel.of(path): path for path in paths}

    def _make(self, part: Part, folder: Path) -> Path:
        """The wheel of a part, built or fetched from its source."""
        path, source = part.source.path, part.source
        if source.kind == "pypi":
            (wheel,) = self._fetch([source.value], ["--no-deps"], folder)
            return wheel
        if source.kind == "wheel":
            pin = f"{part.distribution} @ {path.as_uri() if path else source.value}"
            (wheel,) = self._fetch([pin], ["--no-deps"], folder)
            return wheel
        if path is None:  # git:URL@COMMIT
            path = folder / "source"
            url, _, commit = source.value.rpartition("@")
            self._run(["git", "clone", "--quiet", "--", url, str(path)], part)
            self._run(["git", "-C", str(path), "checkout", "--quiet", commit], part)
        how = [] if self.isolation else ["--no-build-isolation"]
        target = ["--python", sys.executable, "--out-dir", str(folder / "made")]
        self._run([self.uv.program, "build", "--wheel", *how, *target, str(path)], part)
        return next((folder / "made").glob("*.whl"))

    def _run(self, command: Sequence[str], part: Part) -> None:
        try:
            environ = {**self.uv.environ, **_REPRODUCIBLE}
            run(command, environ, lambda line: None, "build a wheel", part.distribution)
        except (WorkError, OSError) as error:
            raise _failed(part.distribution, getattr(error, "faults", [str(error)])) from error

    def _fetch(
        self, pins: Sequence[str], how: Sequence[str], folder: Path, but: Iterable[str] = ()
    ) -> list[Path]:
        """The wheels that uv resolves these requirements to, checked against uv's hashes."""
        from packaging.pylock import PackageArchive, PackageWheel, Pylock

        options = ["--quiet", "--no-header", "--format", "pylock.toml", *ONLY_WHEELS, *how]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = Pylock.from_dict(tomllib.loads(self.uv.compile(options, pins)))
        except InputError as error:
            raise _failed(", ".join(pins), error.faults) from error
        paths = []
        for package, file in lock.select():
            if package.name not in but and isinstance(file, PackageArchive | PackageWheel):
                paths.append(self._download(file, folder))
        return paths

    def _download(self, file: PackageArchive | PackageWheel, folder: Path) -> Path:
        url = file.url or Path(file.path or "").as_uri()
        path = folder / file_name(url)
        try:
            if local := local_path(url):
                shutil.copyfile(local, path)
            else:
                with _opener(self.uv.environ).open(url) as answer, path.open("xb") as out:
                    shutil.copyfileobj(answer, out)
        except OSError as error:
            raise _failed(url, [str(error)]) from error
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != (wanted := file.hashes.get("sha256", found if local else "none")):
            raise _failed(url, [f"SHA-256 {found}, the index says {wanted}"])
        return path


def _opener(environ: Mapping[str, str]) -> urllib.request.OpenerDirector:
    """HTTP with the certificate and proxy that uv has from pip's configuration."""
    context = ssl.create_default_context(cafile=environ.get("SSL_CERT_FILE"))
    proxy = environ.get("ALL_PROXY")
    proxies = {"http": proxy, "https": proxy} if proxy else None
    return urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=context)
    )


def _failed(what: str, said: Sequence[str]) -> PluginError:
    return PluginError(
        "X003",
        "a wheel of the bundle could not be built or fetched",
        where=what,
        faults=said,
        remedy="mend what is named, or name a folder with the wheel: --wheels DIR",
    )


def _require_possible(bundle_id: str, catalog: Catalog) -> None:
    """A bundle may be made where its hardware is not."""
    plugins = catalog.resolve(bundle_id)
    faults = [text for each in plugins for text in objections(each, {each.requires_tag or ""})]
    if faults:
        raise BackendError(
            "B009",
            f"bundle {bundle_id!r} cannot be made here",
            faults=faults,
            remedy="make it on the platform that it is for",
        )


def _best_wheel(name: str, part: Part, folders: Sequence[Path]) -> Path | None:
    """The newest wheel of the part that the catalog allows and that this Python can install."""
    ours = set(sys_tags())
    fitting = []
    for path in (path for folder in folders for path in folder.glob("*.whl")):
        try:
            its_name, its_version, build_tag, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:  # somebody else's file
            continue
        allowed = SpecifierSet(part.specifier).contains(its_version, prereleases=True)
        if its_name == name and allowed and tags & ours:
            fitting.append((its_version, build_tag, path.name, path))
    return max(fitting)[-1] if fitting else None


def _require_wanted(parts: Mapping[str, Part], made: Iterable[Wheel]) -> None:
    faults, names = [], set()
    for wheel in made:
        names.add(wheel.name)
        part = parts.get(wheel.name)
        faults += part.faults(wheel) if part else [f"{wheel.file}: not what the catalog promises"]
    faults += [f"{name}: its source gives another distribution" for name in parts.keys() - names]
    if faults:
        raise BackendError(
            "B010",
            "the bundle cannot be built: wheels are not what the catalog says",
            faults=faults,
            remedy="name folders with the right wheels: --wheels DIR; or mend the catalog",
        )


def _describe(
    bundle_id: str, catalog: Catalog, wheels: Iterable[Wheel], with_dependencies: bool
) -> About:
    wheels = tuple(wheels)
    tags = [tag for wheel in wheels for tag in _least_bound(wheel.tags)]
    bundle = catalog.bundle(bundle_id)
    return About(
        id=bundle.id,
        description=bundle.description,
        plugins=[plugin.id for plugin in catalog.resolve(bundle_id)],
        vox=version(CORE),
        python=ANY
        if all(map(_is_for_any_python, wheels))
        else f"{sys.version_info.major}.{sys.version_info.minor}",
        platform=ANY if all(tag.platform == "any" for tag in tags) else platform_name(),
        catalog=catalog.digest,
        dependencies=with_dependencies,
    )


def _is_for_any_python(wheel: Wheel) -> bool:
    """Neither of one version, nor from one version on (`py312`, or `cp312` with `abi3`)."""
    return any((tag.interpreter, tag.abi) == ("py3", "none") for tag in wheel.tags)


def _least_bound(tags: Iterable[Tag]) -> list[Tag]:
    """Of a wheel's tags those for any platform, if it has some."""
    return [tag for tag in tags if tag.platform == "any"] or list(tags)
