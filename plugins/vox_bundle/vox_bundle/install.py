"""Plan to install a bundle file, with no network.

    plan = plan_bundle(file, catalog)
    carry_out(plan, ...)            # the same as for `vox plugin install`

The plan installs the bundle's wheels and nothing else, by the hashes of its lock. It is refused for
what stands against any installation, and if the bundle has wheels for another Python or platform,
or needs another vox or torch than is there. Other missing dependencies are notes.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name

from vox_bundle.archive import LOCK, WHEELS, Bundle, Wheel, lock_text
from vox_bundle.verify import unpack, verify
from vox_core.api.installing import (
    CORE,
    KEPT,
    Catalog,
    Change,
    Environment,
    InstallPlan,
    Target,
    device_tags,
    is_met,
    objections,
    plan_wheels,
)
from vox_core.errors import BackendError, InputError, command


def plan_bundle(file: Path, catalog: Catalog) -> InstallPlan:
    """Verify a bundle file and plan to install its wheels.

    What is installed in the same version already stays as it is.

    Raises:
        BackendError: B008, the bundle is not sound; B009, it is not for this environment; B012,
            there is no such file.
        InputError: I001, I005, I006 or I013: why it is refused.
    """
    bundle = verify(file, catalog)
    there = Environment.here().installed.versions
    versions = {wheel.name: wheel.version for wheel in bundle.wheels}
    lacking = [*_lacking(bundle, {**there, **versions})]
    _require_fit(bundle, catalog, lacking)
    changed = [wheel for wheel in bundle.wheels if not _is_there(wheel, there)]
    changes = [_change(bundle, wheel, there) for wheel in changed]
    names = {
        plugin.id: canonicalize_name(plugin.distribution) for plugin in catalog.resolve(bundle.id)
    }
    targets = [Target(id, name, f"{name}=={versions[name]}") for id, name in names.items()]
    notes = [*_notes(bundle, catalog, lacking)]
    try:
        return plan_wheels(changes, targets, notes, partial(_unpack, bundle, changed))
    except InputError as error:
        if error.code != "VOX-I001":
            raise
        how = "uv pip install --offline --no-index --no-deps --require-hashes --python PYTHON"
        remedy = f"unpack it, {command('python', '-m', 'zipfile', '-e', file, 'bundle')}, and use "
        remedy += f"an environment of your own: {how} -r bundle/pylock.toml"
        raise error.but(remedy=remedy) from None


def _require_fit(bundle: Bundle, catalog: Catalog, lacking: Sequence[tuple[str, str]]) -> None:
    """Raise BackendError B009, with every reason, if the bundle is not for this environment."""
    ours, tags = {*sys_tags()}, device_tags()
    here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    wrong = [wheel.file for wheel in bundle.wheels if not wheel.tags & ours]
    faults = [f"{file}: not for {here}" for file in wrong]
    for plugin in catalog.resolve(bundle.id):
        faults += objections(plugin, tags)
    faults += [fault for name, fault in lacking if name in KEPT]
    if faults:
        raise BackendError(
            "B009",
            "the bundle is not for this environment",
            where=bundle.file,
            faults=faults,
            remedy="make one for it: vox bundle build",
        )


def _lacking(bundle: Bundle, after: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each distribution that is missing or of another version, and that in words."""
    for owner, needs in bundle.needs.items():
        for need in needs:
            name = canonicalize_name(need.name)
            applies = need.marker is None or need.marker.evaluate({"extra": ""})
            if applies and not is_met(need, after):
                is_here = f"here it is {after[name]}" if name in after else "which is not here"
                yield name, f"{owner} needs {need}, {is_here}"


def _notes(bundle: Bundle, catalog: Catalog, lacking: Sequence[tuple[str, str]]) -> Iterator[str]:
    plugins = [plugin.id for plugin in catalog.resolve(bundle.id)]
    description = catalog.bundle(bundle.id).description
    yield f"bundle {bundle.id}: {description}; plugins: {', '.join(plugins) or 'none'}"
    if (core := version(CORE)) != bundle.vox:
        yield f"made with {CORE} {bundle.vox}, here it is {core}"
    if others := bundle.dependencies(catalog):
        yield f"dependencies, for which the catalog has no rules: {', '.join(others)}"
    yield from (f"{text}; the bundle does not bring it" for _, text in lacking)


def _is_there(wheel: Wheel, installed: Mapping[str, str]) -> bool:
    """Whether that version is installed; `2.5+cpu` is a 2.5."""
    exact = SpecifierSet(f"=={wheel.version}")
    found = installed.get(wheel.name)
    return found is not None and exact.contains(found, prereleases=True)


def _change(bundle: Bundle, wheel: Wheel, installed: Mapping[str, str]) -> Change:
    source = f"{bundle.file.absolute().as_uri()}/{wheel.member}"
    before = installed.get(wheel.name)
    return Change(wheel.name, before, wheel.version, source, sha256=wheel.sha256, size=wheel.size)


def _unpack(bundle: Bundle, wheels: Sequence[Wheel], folder: Path) -> None:
    unpack(bundle, wheels, folder / WHEELS)
    (folder / LOCK).write_text(lock_text(wheels), encoding="utf-8")
