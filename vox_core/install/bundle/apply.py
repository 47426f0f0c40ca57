"""A bundle file installed into an environment, with no network.

    plan = plan_apply(file, catalog)
    apply(plan)                     # vox_core.install.apply, the same as for `vox plugin install`

The plan installs the bundle's wheels and nothing else, by the hashes of its lock. It is refused for
what stands against any installation, and if the bundle is for another Python or platform, or its
plugins need another vox or torch than is there. Other missing dependencies are notes. The
environment may be that of another interpreter.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags, sys_tags
from packaging.utils import canonicalize_name

from vox_core.catalog import Catalog, objections
from vox_core.errors import BackendError, InputError, command
from vox_core.install.bundle.archive import (
    ANY,
    LOCK,
    WHEELS,
    Bundle,
    Wheel,
    beyond_parts,
    lock_text,
    parts_of,
)
from vox_core.install.bundle.verify import invalid, opened, requires, unpack, verified
from vox_core.install.environment import CORE, KEPT, Environment, Installed, is_met, requirements
from vox_core.install.plan import (
    Change,
    InstallPlan,
    require_kept,
    require_no_intruder,
    require_whole,
)
from vox_core.install.targets import Target

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def plan_apply(file: Path, catalog: Catalog, python: str = sys.executable) -> InstallPlan:
    """Verify a bundle file and plan to install its wheels.

    What is installed in the same version already stays as it is.

    Args:
        python: the interpreter of the environment to install into.

    Raises:
        BackendError: B008, the bundle is not sound; B009, it is not for that environment; B012,
            there is no such file.
        InputError: I001, I005, I006 or I013: why it is refused.
    """
    with opened(file) as archive:
        bundle = verified(file, archive, catalog)
        own = [wheel for wheel in bundle.wheels if wheel.name in parts_of(bundle.about.id, catalog)]
        faults: list[str] = []
        texts = {wheel.name: requires(archive, wheel, faults) for wheel in own}
    if faults:
        raise invalid(file, faults)
    environment = Environment.here() if python == sys.executable else Environment.of(python)
    require_whole(environment)
    installed = environment.installed()
    there = installed.versions
    after = {**there, **{wheel.name: wheel.version for wheel in bundle.wheels}}
    needs = {name: [*requirements(its, environment.version)] for name, its in texts.items()}
    lacking = [*_lacking(needs, after)]
    _require_fit(bundle, catalog, environment, after, lacking)
    changed = [wheel for wheel in bundle.wheels if not _is_there(wheel, there)]
    changes = tuple(_change(bundle, wheel, there) for wheel in changed)
    _require_allowed(bundle, changes, environment, installed)
    return InstallPlan(
        "install",
        environment,
        changes,
        _targets(bundle, catalog),
        tuple(_notes(bundle, catalog, after, lacking)),
        installed=there,
        unpack=partial(_unpack, bundle, changed),
    )


def platform_name() -> str:
    """`linux-x86_64`, as `About` has it."""
    return f"{platform.system()}-{platform.machine()}".lower()


def _require_fit(
    bundle: Bundle,
    catalog: Catalog,
    environment: Environment,
    after: Mapping[str, str],
    lacking: Sequence[tuple[str, str]],
) -> None:
    """Raises BackendError B009, with every reason, if the bundle is not for this environment."""
    from vox_core.host.probe import accelerators

    about, tags = bundle.about, {"cpu", *(each.tag for each in accelerators())}
    minor = _minor(environment)
    faults = []
    if about.python not in (ANY, minor):
        faults.append(f"made for Python {about.python}, this is {minor}")
    if about.platform not in (ANY, here := platform_name()):
        faults.append(f"made for {about.platform}, this is {here}")
    ours = {*_tags(environment)}
    faults += [
        f"{wheel.file}: not for Python {environment.version} on {platform_name()}"
        for wheel in bundle.wheels
        if not wheel.tags & ours
    ]
    markers = {"python_version": minor, "python_full_version": environment.version}
    for plugin in catalog.resolve(about.id):
        faults += objections(plugin, tags, markers)
    if CORE not in after:
        faults.append(f"{CORE} is not here, and the bundle does not bring it")
    faults += [fault for name, fault in lacking if name in KEPT]
    if faults:
        raise BackendError(
            "B009",
            "the bundle is not for this environment",
            where=environment,
            faults=faults,
            remedy="make one for it: vox bundle build; or name another one: --target-python",
        )


def _lacking(
    needs: Mapping[str, Sequence[Requirement]], after: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Name of each distribution that is missing or of another version, and that in words."""
    for owner, its_needs in needs.items():
        for need in its_needs:
            name = canonicalize_name(need.name)
            if not is_met(need, after):
                is_here = f"here it is {after[name]}" if name in after else "which is not here"
                yield name, f"{owner} needs {need}, {is_here}"


def _notes(
    bundle: Bundle,
    catalog: Catalog,
    after: Mapping[str, str],
    lacking: Sequence[tuple[str, str]],
) -> Iterator[str]:
    about = bundle.about
    yield f"bundle {about.id}: {about.description}; plugins: {', '.join(about.plugins) or 'none'}"
    if (core := after[CORE]) != about.vox:
        yield f"made with {CORE} {about.vox}, here it is {core}"
    if others := beyond_parts(bundle, catalog):
        names = ", ".join(f"{each.name} {each.version}" for each in others)
        yield f"dependencies, for which the catalog has no rules: {names}"
    yield from (f"{text}; the bundle does not bring it" for _, text in lacking)


def _is_there(wheel: Wheel, installed: Mapping[str, str]) -> bool:
    """Whether that version is installed; `2.5+cpu` is a 2.5."""
    version = installed.get(wheel.name)
    return version is not None and SpecifierSet(f"=={wheel.version}").contains(
        version, prereleases=True
    )


def _change(bundle: Bundle, wheel: Wheel, installed: Mapping[str, str]) -> Change:
    source = f"{bundle.file.absolute().as_uri()}/{wheel.member}"
    before = installed.get(wheel.name)
    return Change(wheel.name, before, wheel.version, source, sha256=wheel.sha256, size=wheel.size)


def _require_allowed(
    bundle: Bundle, changes: Sequence[Change], environment: Environment, there: Installed
) -> None:
    files = {wheel.name: wheel.member for wheel in bundle.wheels}
    try:
        environment.require_changeable(add=[files[change.name] for change in changes])
    except InputError as error:
        step = command(sys.executable, "-m", "zipfile", "-e", bundle.file, ".")
        error.remedy = f"unpack the bundle: {step}; then {error.remedy}"
        raise
    require_no_intruder(environment, there)
    require_kept(changes, environment, there)


def _targets(bundle: Bundle, catalog: Catalog) -> tuple[Target, ...]:
    """The plugins of the bundle, in its versions."""
    versions = {wheel.name: wheel.version for wheel in bundle.wheels}
    names = {
        plugin.id: canonicalize_name(plugin.distribution)
        for plugin in catalog.resolve(bundle.about.id)
    }
    return tuple(Target(id, name, f"{name}=={versions[name]}") for id, name in names.items())


def _unpack(bundle: Bundle, wheels: Sequence[Wheel], folder: Path) -> None:
    unpack(bundle, wheels, folder / WHEELS)
    (folder / LOCK).write_text(lock_text(wheels), encoding="utf-8")


def _minor(environment: Environment) -> str:
    return ".".join(environment.version.split(".")[:2])


def _tags(environment: Environment) -> Iterator[Tag]:
    """Those of the wheels that an interpreter of this environment's version can install."""
    minor = _minor(environment)
    if minor == ".".join(platform.python_version_tuple()[:2]):
        yield from sys_tags()
        return
    version = tuple(map(int, minor.split(".")))
    yield from cpython_tags(version)
    yield from compatible_tags(version, interpreter=f"cp{version[0]}{version[1]}")
