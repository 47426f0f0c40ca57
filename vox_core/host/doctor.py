"""List every plugin with its status, and check installed ones, with a remedy for each finding.

`inventory` reads metadata, manifests and the catalog:

    installed      requirements met, as far as metadata shows
    disabled       disabled or blocked by the user (blocked.py)
    available      in the catalog, and not installed
    incompatible   another API, system, processor, Python or device, or withdrawn by its catalog
    broken         no valid manifest, or a distribution that it needs is missing

`examine` also checks each kind of requirement and the hardware probe. Then a child process imports
the plugin, checks its hooks and calls its `vox_doctor` (child.py). The child has a time limit; a
crash, hang or exit becomes a finding. This process never imports a plugin. A plugin that is
blocked, broken or incompatible is not imported; its finding says why.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from packaging.utils import canonicalize_name
from pydantic import TypeAdapter, ValidationError

from vox_core.catalog import PluginEntry, objections
from vox_core.config import SECTIONS
from vox_core.contract import Check
from vox_core.errors import BackendError, ConfigError
from vox_core.host.blocked import blocked_plugins, blocking
from vox_core.host.discover import Found, discover, known_plugins
from vox_core.host.judge import ABSENT, on_one_line
from vox_core.host.load import POINTS, names_of, provider
from vox_core.host.probe import (
    Hardware,
    Machine,
    ProbeFault,
    accelerators,
    device_tags,
    hardware_remedy,
    missing_libraries,
    probe_all,
    probe_remedy,
    requirement_remedy,
    requirements,
    this_machine,
    unmet,
)
from vox_core.host.process import Failed, child_command, output_of
from vox_core.text import counted, did_you_mean, hint

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
    """Return every plugin, sorted by id; plugins that share an id are all listed."""
    plugins, known = discover(), known_plugins()
    machine = this_machine()
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
    return {each.id for each in going} - {each.id for each in plugins if each not in going}


def unknown_plugin(plugin_id: str, known: Sequence[str]) -> BackendError:
    """Return the error for an id that is not installed, with the command to install it."""
    if plugin_id in known_plugins():
        what = f"plugin {plugin_id!r} is not installed"
        return BackendError("B003", what, remedy=f"vox plugin install {plugin_id}")
    names = sorted(set(known))
    what, found = f"plugin {plugin_id!r} is unknown", f"known plugins: {', '.join(names) or 'none'}"
    remedy = did_you_mean(plugin_id, names) or "`vox plugin list` lists the plugins"
    return BackendError("B003", what, found=found, remedy=remedy)


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
    schema = TypeAdapter(type(plugin.manifest))
    return {
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point.value,
        "folder": str(plugin.folder) if plugin.folder else None,
        "manifest": schema.dump_python(plugin.manifest, exclude_defaults=True),
        "fault": str(plugin.fault) if plugin.fault else None,
        "warning": plugin.mismatch or None,
    }


LIMIT_S = 30.0
"""Time limit of a child; importing a tensor library from a cold disk may take half of it."""
CHILDREN = 4
"""Concurrent children; each may hold a tensor library in memory."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The checks of one plugin, or of the environment (id `environment`)."""

    id: str
    distribution: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def examine(
    plugin_id: str | None = None,
    limit_s: float = LIMIT_S,
    objection: Callable[[tuple[str, ...]], str] = lambda path: "",
    further: Sequence[Check] = (),
) -> tuple[Examined, ...]:
    """Check one plugin, or the environment and every plugin, sorted by id.

    Args:
        limit_s: seconds for each plugin's own code.
        objection: returns why no plugin can declare the command of a path; empty if one can.
        further: additional checks of the environment.

    Raises:
        BackendError: B003; no such plugin is installed.
        ConfigError: `vox.toml` or a variable about plugins or hardware is wrong.
    """
    everything = discover()
    machine = this_machine()
    blocked = blocked_plugins([plugin.id for plugin in everything])
    plugins = [plugin for plugin in everything if plugin_id in (None, plugin.id)]
    if plugin_id is not None and not plugins:
        raise unknown_plugin(plugin_id, [plugin.id for plugin in everything])
    static = [_static(plugin, machine, blocked.get(plugin.id)) for plugin in plugins]
    sound = [
        plugin
        for plugin, checks in zip(plugins, static, strict=True)
        if plugin.id not in blocked and all(check.ok for check in checks)
    ]
    hardware = probe_all([each for each in sound if each.manifest and each.manifest.probe])
    with ThreadPoolExecutor(max_workers=CHILDREN) as pool:
        answers = pool.map(lambda plugin: _ask(plugin, limit_s), sound)
        own = {plugin.id: checks for plugin, checks in zip(sound, answers, strict=True)}
    examined = [] if plugin_id else [_environment(machine, further)]
    for plugin, its in zip(plugins, static, strict=True):
        checks = [*its]
        if plugin.mismatch:  # the plugin is used either way
            checks.append(Check("version", False, plugin.mismatch, _same_version(plugin)))
        if plugin.manifest and (lacking := missing_libraries(plugin.distribution)):
            remedy = requirement_remedy(plugin.manifest, "distribution")
            checks.append(Check("libraries", False, lacking, remedy))
        checks += [*_commands(plugin, everything, objection), *_points(plugin, everything)]
        if plugin.id in hardware:
            checks.append(_hardware_check(plugin, hardware[plugin.id]))
        checks += own.get(plugin.id, ())
        examined.append(Examined(plugin.id, plugin.distribution, tuple(checks)))
    return tuple(examined)


# --- by the core ----------------------------------------------------------------------------------


def _environment(machine: Machine, further: Sequence[Check]) -> Examined:
    own = sorted(name for name in os.environ if name.startswith("VOX_"))
    facts = {
        "python": f"{machine.python} ({sys.executable})",
        "platform": f"{machine.os} {machine.arch}, {platform.release()}",
        "accelerators": ", ".join(each.name for each in accelerators()) or "none that vox can see",
        **{name: "set" if name.endswith(("_KEY", "_TOKEN")) else os.environ[name] for name in own},
    }
    checks = [Check(name, True, detail) for name, detail in facts.items()]
    return Examined("environment", "", (*checks, _catalog(), *further))


def _catalog() -> Check:
    """Check the catalog; a faulty one is a finding here and an error in other commands."""
    try:
        known = known_plugins()
    except ConfigError as error:
        return Check("catalog", False, f"{on_one_line(error)} ({error.where})", error.remedy)
    return Check("catalog", True, f"{counted(len(known), 'plugin')}: {', '.join(known)}")


def _static(plugin: Found, machine: Machine, blocked_by: str | None) -> list[Check]:
    if plugin.manifest is None:
        assert plugin.fault is not None, plugin.id
        fault, where = plugin.fault, f" ({plugin.fault.where})" if plugin.fault.where else ""
        return [Check("manifest", False, f"{on_one_line(fault)}{where}", fault.remedy)]
    manifest = plugin.manifest
    checks = [Check("manifest", True, f"version {manifest.version}, API {manifest.api}")]
    for kind, reason in requirements(manifest, machine).items():
        remedy = requirement_remedy(manifest, kind) if reason else None
        checks.append(Check(kind, not reason, reason or "as required", remedy))
    if blocked_by:
        detail = f"its own code was not run: {blocking(plugin.id, blocked_by)}"
        checks.append(Check("blocked", True, detail))
    return checks


def _same_version(plugin: Found) -> str:
    return (
        f"as its user: vox plugin upgrade {plugin.id}, or install a changed checkout again; "
        f"as its author: give vox_plugin.toml and {plugin.distribution} the same version"
    )


def _commands(
    plugin: Found, everything: Sequence[Found], objection: Callable[[tuple[str, ...]], str]
) -> list[Check]:
    """Check that `vox` reaches the plugin's commands; those of vox itself win."""
    every = [name for each in everything for name in names_of("commands", each)]
    checks, mine = [], names_of("commands", plugin)
    for name in mine:
        reason = objection(tuple(name.split()))
        if above := [each for each in every if name.startswith(f"{each} ")]:
            reason = reason or f"vox {above[0]} is a command, and takes none below it"
        if reason:
            remedy = "its author has to rename the command"
            checks.append(Check("command", False, f"vox {name}: {reason}", remedy))
    return checks or [Check("commands", True, ", ".join(mine))] * bool(mine)


def _points(plugin: Found, everything: Sequence[Found]) -> Iterator[Check]:
    """Find names that two plugins provide, and note points that only other plugins may define."""
    provides = plugin.manifest.provided if plugin.manifest else {}
    if unknown := sorted(provides.keys() - POINTS.keys() - {"hooks", "commands"}):
        words = "not extension points of the core; other plugins may read them"
        named = ", ".join(f"{each}{hint(each, POINTS)}" for each in unknown)
        yield Check("provides", True, f"{named}: {words}")
    if own := {*provides.get("settings", ())} & {kind.section for kind in SECTIONS}:
        words = f"the section [{min(own)}] of vox.toml is vox's own"
        yield Check("provides", False, words, "its author has to rename it")
    for point, name in [(each, name) for each in provides for name in provides[each]]:
        try:
            provider(point, name, everything)
        except BackendError as error:
            if error.code == "VOX-B014" and point in (*POINTS, "commands"):
                yield Check("provides", False, on_one_line(error), error.remedy)


def _hardware_check(plugin: Found, found: Hardware | ProbeFault) -> Check:
    if isinstance(found, ProbeFault):
        return Check("hardware", False, found.reason, probe_remedy(plugin, found.reason))
    if found.present:
        return Check("hardware", True, found.detail)
    tag = plugin.manifest.requires.hardware_tag if plugin.manifest else None
    look = f"if this machine has it: {hardware_remedy(tag)}"
    return Check("hardware", False, f"{ABSENT}{found.detail}", look)


# --- by the plugin, in a process of its own -------------------------------------------------------


def _ask(plugin: Found, limit_s: float) -> tuple[Check, ...]:
    try:
        answer = output_of(child_command("answer", plugin.id), limit_s)
        return TypeAdapter(tuple[Check, ...]).validate_json(answer)
    except Failed as fault:
        how = str(fault)
    except ValidationError:  # the plugin exited with code 0
        how = "ended the process"
    return (Check("code", False, f"its code {how}", plugin.upgrade_or_report),)
