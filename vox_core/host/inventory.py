"""List every plugin that is installed or in the catalog, with its status on this machine.

    installed      requirements met, as far as metadata shows
    disabled       disabled or blocked by the user (blocked.py)
    available      in the catalog, and not installed
    incompatible   another API, system, processor, Python or device, or withdrawn by its catalog
    broken         no valid manifest, or a distribution that it needs is missing

Only metadata, manifests and the catalog are read. `vox plugin doctor` (doctor.py) also checks the
hardware and imports the code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from packaging.utils import canonicalize_name

from vox_core.catalog import PluginEntry, objections
from vox_core.errors import BackendError
from vox_core.host.blocked import blocked_plugins, blocking
from vox_core.host.discover import Found, discover
from vox_core.host.judge import on_one_line
from vox_core.host.machine import Machine, this_machine, unmet
from vox_core.host.probe import device_tags
from vox_core.known import known_plugins
from vox_core.text import did_you_mean

Status: TypeAlias = Literal["installed", "disabled", "available", "incompatible", "broken"]


@dataclass(frozen=True, slots=True)
class Listed:
    """A plugin and its status; `version` and `distribution` are empty if it is not installed."""

    id: str
    status: Status
    reason: str
    version: str = ""
    distribution: str = ""


def inventory() -> tuple[Listed, ...]:
    """Return every plugin, sorted by id; plugins that share an id are all listed.

    Raises:
        ConfigError: the catalog, `vox.toml` or a variable about plugins is wrong.
    """
    plugins, known = discover(), known_plugins()
    machine = this_machine(plugins)
    blocked = blocked_plugins([plugin.id for plugin in plugins])
    listed = [_installed(plugin, machine, blocked.get(plugin.id)) for plugin in plugins]
    present = {plugin.id for plugin in plugins}
    tags = device_tags()
    listed += [_offered(entry, tags) for entry in known.values() if entry.id not in present]
    return tuple(sorted(listed, key=lambda each: (each.id, each.distribution)))


def details(plugin_id: str) -> dict[str, Any]:
    """Return all facts about one plugin as JSON types: `id`, `listed`, `installed`, `catalog`.

    `installed` holds one object for each distribution that defines the id, `catalog` its entry or
    None.

    Raises:
        BackendError: B003; it is neither installed nor in the catalog.
        ConfigError: the catalog, `vox.toml` or a variable about plugins is wrong.
    """
    everything = inventory()
    listed = [each for each in everything if each.id == plugin_id]
    if not listed:
        raise unknown_plugin(plugin_id, [each.id for each in everything])
    entry = known_plugins().get(plugin_id)
    return {
        "id": plugin_id,
        "listed": [asdict(each) for each in listed],
        "installed": [_facts(plugin) for plugin in discover() if plugin.id == plugin_id],
        "catalog": {**entry.model_dump(), "catalog": entry.catalog} if entry else None,
    }


def leaving(distributions: Collection[str]) -> set[str]:
    """Return the ids left without a plugin once these distributions (canonical names) are
    removed."""
    plugins = discover()
    going = [each for each in plugins if canonicalize_name(each.distribution) in distributions]
    staying = {each.id for each in plugins if each not in going}
    return {each.id for each in going} - staying


def unknown_plugin(plugin_id: str, known: Sequence[str]) -> BackendError:
    """Return the error for an id that is not installed, with the command to install it."""
    if plugin_id in known_plugins():
        return BackendError(
            "B003",
            f"plugin {plugin_id!r} is not installed",
            remedy=f"vox plugin install {plugin_id}",
        )
    names = sorted(set(known))
    return BackendError(
        "B003",
        f"plugin {plugin_id!r} is unknown",
        found=f"known plugins: {', '.join(names) or 'none'}",
        remedy=did_you_mean(plugin_id, names) or "`vox plugin list` lists the plugins",
    )


def _installed(plugin: Found, machine: Machine, blocked_by: str | None) -> Listed:
    status: Status = "broken"
    if plugin.manifest is None:
        assert plugin.fault is not None, plugin.id
        reason = on_one_line(plugin.fault)
    elif requirement := unmet(plugin.manifest, machine):
        status = "broken" if requirement[0] == "distribution" else "incompatible"
        reason = ": ".join(requirement)
    elif blocked_by:
        status, reason = "disabled", blocking(plugin.id, blocked_by)
    else:
        status, reason = "installed", plugin.manifest.name
    reason = "; ".join(filter(None, (reason, plugin.mismatch)))
    return Listed(plugin.id, status, reason, plugin.shown_version, plugin.distribution)


def _offered(entry: PluginEntry, tags: Collection[str]) -> Listed:
    if against := objections(entry, tags):
        reasons = [reason.removeprefix(f"{entry.id}: ") for reason in against]
        return Listed(entry.id, "incompatible", f"not installed: {'; '.join(reasons)}")
    return Listed(entry.id, "available", f"{entry.description}: vox plugin install {entry.id}")


def _facts(plugin: Found) -> dict[str, Any]:
    return {
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point.value,
        "folder": str(plugin.folder) if plugin.folder else None,
        "manifest": asdict(plugin.manifest) if plugin.manifest else None,
        "fault": str(plugin.fault) if plugin.fault else None,
        "warning": plugin.mismatch or None,
    }
