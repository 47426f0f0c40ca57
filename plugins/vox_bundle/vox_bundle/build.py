"""Build a bundle file: find, build or fetch a wheel of each distribution with uv, and pack them."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from vox_bundle.archive import Bundle, Part, Wheel, parts_of, sha256_of, write
from vox_bundle.verify import verify
from vox_core.api.files import make_folder
from vox_core.api.installing import (
    CORE,
    ONLY_WHEELS,
    Catalog,
    Environment,
    Uv,
    file_name,
    last_lines,
    local_path,
    objections,
)
from vox_core.errors import BackendError, InputError, PluginError

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
    """Make the bundle file `out`, for this platform and this Python, and verify it.

    Args:
        out: replaced if it is there; untouched if the bundle cannot be built.
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
    make_folder(out.parent)
    with tempfile.TemporaryDirectory(prefix=".vox-bundle-", dir=out.parent) as scratch:
        maker = _Maker(Path(scratch), wheel_folders, isolation)
        made = maker.gather(parts)
        if with_dependencies:
            made |= maker.closure(made)
        file = Path(scratch, "bundle.zip")
        write(file, bundle_id, version(CORE), made)
        try:
            bundle = verify(file, catalog)
        except BackendError as error:
            what = "the bundle cannot be built: wheels are not what the catalog says"
            remedy = "name folders with the right wheels: --wheels DIR; or mend the catalog"
            raise _impossible(what, error.faults, remedy) from error
        file.replace(out)
    return Bundle(out, bundle_id, bundle.vox, bundle.wheels, bundle.needs)


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
        """Return a wheel of each part, from the folders or made from its source."""
        found = {name: _best_wheel(name, part, self.folders) for name, part in parts.items()}
        lacking = [part for name, part in parts.items() if found[name] is None]
        paths = {part.distribution: part.source.path for part in lacking}
        if faults := [
            f"{name}: {path} is not there"
            for name, path in paths.items()
            if path and not path.exists()
        ]:
            what = "the bundle cannot be built: sources are missing"
            remedy = "build it in a checkout of vox, or name folders with wheels: --wheels DIR"
            raise _impossible(what, faults, remedy)
        made = [self._make(part, self.scratch / str(n)) for n, part in enumerate(lacking)]
        return {Wheel.of(path): path for path in (*found.values(), *made) if path is not None}

    def closure(self, own: Mapping[Wheel, Path]) -> dict[Wheel, Path]:
        """Return wheels of what the bundle's own wheels need, without these."""
        pins = [f"{wheel.name} @ {path.absolute().as_uri()}" for wheel, path in own.items()]
        paths = self._fetch(pins, [], self.scratch / "closure", [wheel.name for wheel in own])
        return {Wheel.of(path): path for path in paths}

    def _make(self, part: Part, folder: Path) -> Path:
        """Build or fetch the wheel of a part from its source."""
        path, source = part.source.path, part.source
        if source.kind in ("pypi", "wheel"):
            pin = source.value
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
        environ = {**self.uv.environ, **_REPRODUCIBLE}
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=True,
                env=environ,
            )
        except subprocess.CalledProcessError as error:
            raise _failed(part.distribution, last_lines(error.stderr)) from error
        except OSError as error:  # no git
            raise _failed(part.distribution, [str(error)]) from error

    def _fetch(
        self, pins: Sequence[str], how: Sequence[str], folder: Path, but: Sequence[str] = ()
    ) -> list[Path]:
        """Fetch the wheels that uv resolves these requirements to; check them by uv's hashes."""
        from packaging.pylock import PackageArchive, PackageWheel, Pylock

        make_folder(folder)
        try:
            lock = Pylock.from_dict(tomllib.loads(self.uv.lock(pins, [*ONLY_WHEELS, *how])))
        except InputError as error:
            raise _failed(", ".join(pins), error.faults) from error
        return [
            self._download(file, folder)
            for package, file in lock.select()
            if package.name not in but and isinstance(file, PackageArchive | PackageWheel)
        ]

    def _download(self, file: PackageArchive | PackageWheel, folder: Path) -> Path:
        url = file.url or Path(file.path or "").as_uri()
        path, local = folder / file_name(url), local_path(url)
        try:
            if local:
                shutil.copyfile(local, path)
            else:
                with _opener(self.uv.environ).open(url) as answer, path.open("xb") as out:
                    shutil.copyfileobj(answer, out)
        except OSError as error:
            raise _failed(url, [str(error)]) from error
        found = sha256_of(path)
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


def _impossible(what: str, faults: Sequence[str], remedy: str) -> BackendError:
    return BackendError("B010", what, faults=faults, remedy=remedy)


def _require_possible(bundle_id: str, catalog: Catalog) -> None:
    """A bundle may be made where its hardware is not."""
    plugins = catalog.resolve(bundle_id)
    if faults := [text for each in plugins for text in objections(each, {each.requires_tag or ""})]:
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
