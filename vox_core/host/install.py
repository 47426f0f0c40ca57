"""Installing, upgrading and removing plugins: planned whole, done whole or not at all.

    plan = plan_install(["cpu"])
    print(plan.changes)             # what, from where, which hash, what size
    apply(plan)

A plan is refused before anything is done if the environment is not vox's to change
(environment.py) or if something else stands against it (guards.py): the core or torch would change,
an archive is not the one that the catalog pins, something that is installed needs what would go
(held.py), or a wheel brings files of others (owners.py). installation.py carries it out.

Which package an id stands for is for the catalog (targets.py). A bundle is planned in
bundle/apply.py. No plugin is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from vox_core.catalog import PluginEntry
from vox_core.errors import InputError, command
from vox_core.host import targets
from vox_core.host.discover import Found, discover
from vox_core.host.environment import Environment
from vox_core.host.guards import (
    KEPT,
    require_as_named,
    require_inside,
    require_kept,
    require_no_intruder,
    require_pinned,
)
from vox_core.host.held import require_needs_kept
from vox_core.host.installation import InstallPlan, Report, apply
from vox_core.host.known import known_plugins
from vox_core.host.origin import is_editable, local_path, origin
from vox_core.host.owners import require_own_files
from vox_core.host.resolve import Change, must_build, resolve
from vox_core.host.rollback import leftovers
from vox_core.host.targets import Target

__all__ = ["InstallPlan", "apply", "plan_install", "plan_remove", "plan_upgrade"]


def plan_install(
    ids: Sequence[str] = (),
    *,
    path: Path | None = None,
    wheel: Path | None = None,
    pypi: str | None = None,
    catalog: Mapping[str, PluginEntry] | None = None,
    environment: Environment | None = None,
    allow_source: bool = False,
    report: Report = lambda line: None,
) -> InstallPlan:
    """Plan to install plugins of the catalog, or one plugin from a source.

    Args:
        ids: of the catalog; with a source at most one, of the plugin that it holds.
        path: a folder with the plugin's source.
        wheel: a wheel of it.
        pypi: `NAME==VERSION`.
        allow_source: what an index has no wheel of may be built.
        report: called, before it is done, with what has to be built to make the plan.

    Raises:
        InputError: I001 to I007, what stands against it.
    """
    catalog = known_plugins() if catalog is None else catalog
    id = ids[0] if ids else None
    if path is not None:
        wanted = [targets.from_path(path, id, catalog)]
    elif wheel is not None:
        wanted = [targets.from_wheel(wheel, id, catalog)]
    elif pypi is not None:
        wanted = [targets.from_pypi(pypi, id, catalog)]
    else:
        wanted = targets.from_catalog(ids, catalog)
    environment = environment or Environment.here()
    return _plan("install", environment, wanted, allow_source=allow_source, report=report)


def plan_upgrade(
    ids: Sequence[str] = (),
    *,
    catalog: Mapping[str, PluginEntry] | None = None,
    environment: Environment | None = None,
    allow_source: bool = False,
    report: Report = lambda line: None,
) -> InstallPlan:
    """Plan to bring installed plugins, or all of them, to what their sources now hold.

    Args:
        allow_source: what an index has no wheel of may be built.
        report: called, before it is done, with what has to be built to make the plan.

    Raises:
        InputError: I001 to I007 and I010, what stands against it.
    """
    catalog = known_plugins() if catalog is None else catalog
    installed = discover()
    chosen = [_installed(id, installed) for id in ids] if ids else installed
    wanted, notes = [], []
    for plugin in chosen:
        target = _newer(plugin, catalog)
        wanted += [target] if isinstance(target, Target) else []
        notes += [target] if isinstance(target, str) else []
    environment = environment or Environment.here()
    return _plan("upgrade", environment, wanted, notes, allow_source=allow_source, report=report)


def plan_remove(ids: Sequence[str], *, environment: Environment | None = None) -> InstallPlan:
    """Plan to remove plugins, broken ones too; what they are built on stays and is told.

    Args:
        ids: of plugins, or names of their distributions.

    Raises:
        InputError: I001, I005 or I010, what stands against it.
    """
    environment = environment or Environment.here()
    installed = discover()
    plugins = [_installed(id, installed) for id in ids]
    names = sorted({canonicalize_name(plugin.distribution) for plugin in plugins})
    environment.require_changeable(remove=names)
    for name in names:
        require_inside(name, environment)
    versions = {canonicalize_name(plugin.distribution): plugin.version for plugin in plugins}
    changes = tuple(Change(name, versions[name], None) for name in names)
    require_needs_kept(changes, environment)
    notes = (*_orphan_notes(names), *_leftover_notes(environment))
    return InstallPlan("remove", environment, changes, notes=notes)


# --- planning -------------------------------------------------------------------------------------


def _plan(
    action: Literal["install", "upgrade"],
    environment: Environment,
    wanted: Sequence[Target],
    notes: Sequence[str] = (),
    *,
    allow_source: bool,
    report: Report,
) -> InstallPlan:
    requirements = [text for target in wanted for text in (target.requirement, *target.libraries)]
    requirements = list(dict.fromkeys(requirements))
    if not requirements:
        return InstallPlan(action, environment, (), (), tuple(notes))
    environment.require_changeable(add=requirements)
    require_no_intruder(environment)
    for text in filter(must_build, requirements):
        report(f"to plan this, {text} is built as far as need be: its code runs on this machine")
    changes = resolve(environment, requirements, allow_source=allow_source)
    require_kept(changes, environment)
    require_pinned(changes, wanted)
    require_as_named(changes, wanted)
    require_own_files(changes, environment)
    notes = (*notes, *_leftover_notes(environment))
    return InstallPlan(action, environment, changes, tuple(wanted), notes)


def _newer(plugin: Found, catalog: Mapping[str, PluginEntry]) -> Target | str:
    """Where an upgrade of `plugin` comes from, or why there is none."""
    name = canonicalize_name(plugin.distribution)
    if is_editable(name):
        return f"{plugin.id}: installed from a checkout in place, which is as new as the checkout"
    entry = catalog.get(plugin.id)
    if entry and canonicalize_name(entry.distribution) == name:
        return targets.from_catalog([plugin.id], catalog, upgrade=True)[0]
    source = origin(name)
    folder = local_path(source.get("url", "")) if "dir_info" in source else None
    if folder and folder.is_dir():
        return targets.from_path(folder, plugin.id, catalog)
    return f"{plugin.id}: in no catalog; a newer version is named whole: " + command(
        "vox", "plugin", "install", "--from-pypi", f"{plugin.distribution}==VERSION"
    )


def _installed(id: str, installed: Sequence[Found]) -> Found:
    """The one plugin of that id, or of the distribution of that name."""
    matches = [plugin for plugin in installed if plugin.id == id] or [
        plugin
        for plugin in installed
        if canonicalize_name(plugin.distribution) == canonicalize_name(id)
    ]
    names = list(dict.fromkeys(plugin.distribution for plugin in matches))
    if len(names) == 1:
        return matches[0]
    if names:
        raise InputError(
            "I010",
            f"more than one plugin has the id {id!r}",
            found=f"distributions {', '.join(names)}",
            remedy=f"name the distribution: {names[-1]}",
        )
    raise InputError(
        "I010",
        f"plugin {id!r} is not installed",
        found=f"installed: {', '.join(plugin.id for plugin in installed) or 'none'}",
        remedy="`vox plugin list` shows what there is",
    )


def _orphan_notes(names: Sequence[str]) -> Iterator[str]:
    from vox_core.host.lock import orphans

    if left := orphans(names, keep=KEPT):
        yield f"nothing else needs: {', '.join(left)}; they stay"


def _leftover_notes(environment: Environment) -> Iterator[str]:
    for left in leftovers(environment):
        yield f"{left.told}; {left.remedy}"
