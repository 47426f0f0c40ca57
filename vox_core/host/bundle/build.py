"""A bundle file made: each distribution's wheel found or made by pip, and all of them packed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from vox_core.catalog import Catalog, objections
from vox_core.errors import BackendError, PluginError
from vox_core.host.bundle.archive import ANY, About, Bundle, Wheel, write
from vox_core.host.bundle.interpreter import ask
from vox_core.host.bundle.parts import Part, parts_of
from vox_core.host.bundle.pip import QUIET, pip

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
        wheel_folders: where a fitting wheel is taken from before the catalog's source is asked.
        with_dependencies: add all that the distributions need, as pip resolves it.
        isolation: build wheels in environments of their own, as pip does by default.

    Raises:
        ConfigError: C007, there is no such bundle.
        BackendError: B009, B010; all faults at once.
        PluginError: X003, pip failed.
        StorageError: an I/O error.
    """
    parts = parts_of(bundle_id, catalog)
    _require_possible(bundle_id, catalog)
    with tempfile.TemporaryDirectory(prefix="vox-bundle-") as scratch:
        made = _gather(parts, wheel_folders, Path(scratch), isolation)
        _require_wanted(parts, made)
        if with_dependencies:
            made |= _closure(made, wheel_folders, Path(scratch), isolation)
        about = _describe(bundle_id, catalog, made, with_dependencies)
        write(out, about, made)
    return Bundle(out, about, tuple(sorted(made, key=lambda wheel: wheel.name)))


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


def _gather(
    parts: Mapping[str, Part], folders: Sequence[Path], scratch: Path, isolation: bool
) -> dict[Wheel, Path]:
    """A wheel of each part, out of the folders or made by pip."""
    found = {name: _best_wheel(name, part, folders) for name, part in parts.items()}
    lacking = [part for name, part in parts.items() if found[name] is None]
    _require_sources(lacking)
    made = [_make(part, scratch / str(number), isolation) for number, part in enumerate(lacking)]
    return {Wheel.of(path): path for path in (*found.values(), *made) if path is not None}


def _best_wheel(name: str, part: Part, folders: Sequence[Path]) -> Path | None:
    """The newest wheel of the part that the catalog allows and that this Python can install."""
    ours = set(sys_tags())
    fitting = []
    for path in (path for folder in folders for path in folder.glob("*.whl")):
        try:
            its_name, version, build_tag, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:  # somebody else's file
            continue
        wanted = SpecifierSet(part.specifier).contains(version, prereleases=True)
        if its_name == name and wanted and ours & tags:
            fitting.append((version, build_tag, path.name, path))
    return max(fitting)[-1] if fitting else None


def _require_sources(parts: Iterable[Part]) -> None:
    """All local sources that are not there, at once."""
    paths = [(part.distribution, part.source.path) for part in parts]
    missing = [f"{name}: {path} is not there" for name, path in paths if path and not path.exists()]
    if missing:
        raise BackendError(
            "B010",
            "the bundle cannot be built: sources are missing",
            faults=missing,
            remedy="build it in a source checkout, or name folders with the wheels: --wheels DIR",
        )


def _make(part: Part, folder: Path, isolation: bool) -> Path:
    """The wheel that pip makes, or fetches, from the part's source."""
    wanted = part.source.requirement(part.distribution)
    how = ["--only-binary=:all:"] if part.source.kind == "pypi" else []
    _wheel(["--no-deps", *how, wanted], folder, isolation)
    return next(folder.glob("*.whl"))


def _closure(
    own: Mapping[Wheel, Path], folders: Sequence[Path], scratch: Path, isolation: bool
) -> dict[Wheel, Path]:
    """What the own wheels need, and those themselves are not."""
    links = [text for each in folders for text in ("--find-links", str(each))]
    target = scratch / "closure"
    _wheel([*links, *map(str, own.values())], target, isolation)
    names = {wheel.name for wheel in own}
    resolved = {Wheel.of(path): path for path in target.glob("*.whl")}
    return {wheel: path for wheel, path in resolved.items() if wheel.name not in names}


def _wheel(arguments: Sequence[str], folder: Path, isolation: bool) -> None:
    how = [] if isolation else ["--no-build-isolation"]
    said = pip(
        sys.executable,
        ["wheel", *QUIET, *how, "--wheel-dir", str(folder), *arguments],
        {**os.environ, **_REPRODUCIBLE},
    )
    if said is not None:
        raise PluginError(
            "X003",
            "pip could not make a wheel of the bundle",
            where=arguments[-1],
            faults=said,
            remedy="mend what pip reports, or name a folder with the wheel: --wheels DIR",
        )


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
    from importlib.metadata import version

    here = ask(sys.executable)
    wheels = tuple(wheels)
    tags = [tag for wheel in wheels for tag in _least_bound(wheel.tags)]
    bundle = catalog.bundle(bundle_id)
    return About(
        id=bundle.id,
        description=bundle.description,
        plugins=[plugin.id for plugin in catalog.resolve(bundle_id)],
        vox=version("vox-ml"),
        python=ANY if all(map(_is_for_any_python, wheels)) else here.version,
        platform=ANY if all(tag.platform == "any" for tag in tags) else here.platform,
        catalog=catalog.digest,
        dependencies=with_dependencies,
    )


def _is_for_any_python(wheel: Wheel) -> bool:
    """Neither of one version, nor from one version on (`py312`, or `cp312` with `abi3`)."""
    return any((tag.interpreter, tag.abi) == ("py3", "none") for tag in wheel.tags)


def _least_bound(tags: Iterable[Tag]) -> list[Tag]:
    """Of a wheel's tags those for any platform, if it has some."""
    return [tag for tag in tags if tag.platform == "any"] or list(tags)
