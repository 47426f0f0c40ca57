"""A bundle file installed into an environment, with no network.

    plan = plan_apply(file, catalog)
    print(plan.changes)
    install.apply(plan)             # the same as for `vox plugin install`

The plan is refused for what stands against any installation, and if the bundle does not fit
(fit.py). install.py carries it out: alone, with the installer seeing the bundle's wheels and
nothing else, the plugins looked for afterwards by the environment's own interpreter, and everything
undone if something fails. The environment may be that of another interpreter.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from vox_core.catalog import Catalog
from vox_core.errors import InputError
from vox_core.host.bundle.archive import Bundle, Wheel
from vox_core.host.bundle.fit import notes, require_fit
from vox_core.host.bundle.interpreter import Interpreter, ask
from vox_core.host.bundle.members import Unreadable
from vox_core.host.bundle.needs import allows, needs_of
from vox_core.host.bundle.read import invalid, opened, unpack
from vox_core.host.bundle.verify import verified
from vox_core.host.environment import Environment
from vox_core.host.guards import require_kept, require_no_intruder
from vox_core.host.install import InstallPlan
from vox_core.host.resolve import Change
from vox_core.host.targets import Target


def plan_apply(file: Path, catalog: Catalog, python: str = sys.executable) -> InstallPlan:
    """Verify a bundle file and plan to install its wheels, and nothing else.

    What is installed in the same version already stays as it is.

    Args:
        python: the interpreter of the environment to install into.

    Raises:
        BackendError: B008, the bundle is not sound; B009, it is not for that environment; B012,
            there is no such file.
        InputError: I001, I005 or I006, what stands against it.
    """
    with opened(file) as archive:
        bundle = verified(file, archive, catalog)
        needs = needs_of(archive, bundle, catalog)
    place = ask(python)
    require_fit(bundle, catalog, needs, place)
    changes = _changes(bundle, place)
    _require_allowed(bundle, changes, place.environment)
    return InstallPlan(
        "install",
        place.environment,
        changes,
        _targets(bundle, catalog),
        tuple(notes(bundle, catalog, needs, place)),
        partial(_unpack, bundle, {change.name for change in changes}),
    )


def _changes(bundle: Bundle, place: Interpreter) -> tuple[Change, ...]:
    found = ((wheel, place.installed.get(wheel.name)) for wheel in bundle.wheels)
    return tuple(_change(bundle, wheel, was) for wheel, was in found if not _is(wheel, was))


def _is(wheel: Wheel, installed: str | None) -> bool:
    """Whether the installer would leave it; `2.5+cpu` is a 2.5 to it."""
    return installed is not None and allows(SpecifierSet(f"=={wheel.version}"), installed)


def _change(bundle: Bundle, wheel: Wheel, before: str | None) -> Change:
    source = f"{bundle.file.absolute().as_uri()}/{wheel.member}"
    return Change(wheel.name, before, wheel.version, source, sha256=wheel.sha256, size=wheel.size)


def _require_allowed(bundle: Bundle, changes: Sequence[Change], environment: Environment) -> None:
    """As for `vox plugin install`; who calls itself vox elsewhere is found out afterwards."""
    files = {wheel.name: wheel.member for wheel in bundle.wheels}
    try:
        environment.require_changeable(add=[files[change.name] for change in changes])
    except InputError as error:
        command = shlex.join([sys.executable, "-m", "zipfile", "-e", str(bundle.file), "."])
        error.remedy = f"unpack the bundle: {command}; then {error.remedy}"
        raise
    environment.installer("install")
    if environment.prefix == Path(sys.prefix):
        require_no_intruder(environment)
    require_kept(changes, environment)


def _targets(bundle: Bundle, catalog: Catalog) -> tuple[Target, ...]:
    """The plugins of the bundle, in its versions."""
    versions = {wheel.name: wheel.version for wheel in bundle.wheels}
    names = {
        plugin.id: canonicalize_name(plugin.distribution)
        for plugin in catalog.resolve(bundle.about.id)
    }
    return tuple(Target(id, name, f"{name}=={versions[name]}") for id, name in names.items())


def _unpack(bundle: Bundle, names: Collection[str], folder: Path) -> None:
    """The wheels of these distributions; the installer holds them against the lock once more."""
    with opened(bundle.file) as archive:
        for wheel in bundle.wheels:
            if wheel.name in names:
                try:
                    unpack(archive, wheel, folder)
                except Unreadable as error:
                    raise invalid(bundle.file, [f"{wheel.member}: {error}"]) from error
