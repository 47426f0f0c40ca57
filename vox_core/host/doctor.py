"""Check each installed plugin and the environment, with a remedy for each finding.

The core checks the manifest, each kind of requirement and the hardware probe. Then a child process
imports the plugin, checks its hooks and calls its `vox_doctor` (child.py). The child has a time
limit; a crash, hang or exit becomes a finding. This process never imports a plugin.

A plugin that is blocked, broken or incompatible is not imported; its finding says why.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from vox_core.contract import Check
from vox_core.errors import ConfigError
from vox_core.host import remedies
from vox_core.host.blocked import blocked_plugins, blocking
from vox_core.host.discover import Found, discover, version_mismatch
from vox_core.host.inventory import unknown_plugin
from vox_core.host.judge import ABSENT, on_one_line
from vox_core.host.known import known_plugins
from vox_core.host.machine import Machine, requirements, this_machine
from vox_core.host.manifest import CommandEntry
from vox_core.host.probe import Hardware, ProbeFault, accelerators, probe_all
from vox_core.host.process import Failed, output_of
from vox_core.host.provide import POINTS

LIMIT_S = 30.0
"""Time limit of a child; importing a tensor library from a cold disk may take half of it."""
CHILDREN = 4
"""Concurrent children; each may hold a tensor library in memory."""

_CHILD = (
    "import json, sys; request = json.load(sys.stdin); sys.path[:] = request['path']; "
    "from vox_core.host.child import answer; answer(request)"
)


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
    environ: Mapping[str, str] = os.environ,
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
    machine = this_machine(everything)
    blocked = blocked_plugins([plugin.id for plugin in everything], environ)
    plugins = [plugin for plugin in everything if plugin_id in (None, plugin.id)]
    if plugin_id is not None and not plugins:
        raise unknown_plugin(plugin_id, [plugin.id for plugin in everything])
    static = [_static(plugin, machine, blocked.get(plugin.id)) for plugin in plugins]
    sound = [
        plugin
        for plugin, checks in zip(plugins, static, strict=True)
        if plugin.id not in blocked and all(check.ok for check in checks)
    ]
    hardware = _hardware(sound, environ)
    own = _own_checks(sound, limit_s)
    examined = [
        Examined(
            plugin.id,
            plugin.distribution,
            (
                *checks,
                *_versions(plugin),
                *_commands(plugin, everything, objection),
                *_unknown_points(plugin),
                *hardware.get(plugin.id, ()),
                *own.get(plugin.id, ()),
            ),
        )
        for plugin, checks in zip(plugins, static, strict=True)
    ]
    return (*([] if plugin_id else [_environment(machine, environ, further)]), *examined)


# --- by the core ----------------------------------------------------------------------------------


def _environment(
    machine: Machine, environ: Mapping[str, str], further: Sequence[Check]
) -> Examined:
    seen = [accelerator.name for accelerator in accelerators(environ)]
    facts = {
        "python": f"{machine.python} ({sys.executable})",
        "platform": f"{machine.os} {machine.arch}, {platform.release()}",
        "accelerators": ", ".join(seen) or "none that the core can see",
    }
    told = {name: environ[name] for name in sorted(environ) if name.startswith("VOX_")}
    checks = [Check(name, True, detail) for name, detail in {**facts, **told}.items()]
    return Examined("environment", "", (*checks, _catalog(environ), *further))


def _catalog(environ: Mapping[str, str]) -> Check:
    """Check the catalog; a faulty one is a finding here and an error in other commands."""
    try:
        known = known_plugins(environ)
    except ConfigError as error:
        return Check("catalog", False, f"{on_one_line(error)} ({error.where})", error.remedy)
    return Check("catalog", True, f"{len(known)} plugins: {', '.join(known)}")


def _static(plugin: Found, machine: Machine, blocked_by: str | None) -> tuple[Check, ...]:
    if plugin.manifest is None:
        assert plugin.fault is not None, plugin.id
        return (Check("manifest", False, on_one_line(plugin.fault), plugin.fault.remedy),)
    manifest = plugin.manifest
    checks = [Check("manifest", True, f"version {manifest.version}, API {manifest.api}")]
    for kind, reason in requirements(manifest, machine).items():
        remedy = remedies.requirement(plugin, kind) if reason else None
        checks.append(Check(kind, not reason, reason or "as required", remedy))
    if blocked_by:
        detail = f"its own code was not run: {blocking(plugin.id, blocked_by)}"
        checks.append(Check("blocked", True, detail))
    return tuple(checks)


def _versions(plugin: Found) -> tuple[Check, ...]:
    """Check that manifest and distribution have the same version; the plugin is used either way."""
    if mismatch := version_mismatch(plugin):
        return (Check("version", False, mismatch, remedies.versions(plugin)),)
    return ()


def _commands(
    plugin: Found, everything: Sequence[Found], objection: Callable[[tuple[str, ...]], str]
) -> tuple[Check, ...]:
    """Check declared commands; the core's win, and of two plugins `vox.toml` decides."""
    if plugin.manifest is None or not plugin.manifest.commands:
        return ()
    owners = [(each.id, name.name) for each in everything for name in _declared(each)]
    checks = []
    for command in plugin.manifest.commands:
        others = [id for id, name in owners if _clash(name, command.name) and id != plugin.id]
        if reason := objection(tuple(command.name.split())):
            remedy = "its author has to rename the command"
            checks.append(Check("command", False, f"vox {command.name}: {reason}", remedy))
        elif others:
            also = f"vox {command.name}: plugin {', '.join(others)} declares it, too"
            remedy = (
                f"disable one of them: vox plugin disable {others[0]}; or decide in vox.toml: "
                f'[plugin.provider] "commands.{command.name}" = "{plugin.id}"'
            )
            checks.append(Check("command", False, also, remedy))
    names = ", ".join(command.name for command in plugin.manifest.commands)
    return tuple(checks) or (Check("commands", True, names),)


def _clash(one: str, other: str) -> bool:
    """Whether two commands have one name, or one would be a command below the other."""
    return one == other or one.startswith(f"{other} ") or other.startswith(f"{one} ")


def _declared(plugin: Found) -> Sequence[CommandEntry]:
    return plugin.manifest.commands if plugin.manifest else ()


def _unknown_points(plugin: Found) -> tuple[Check, ...]:
    """Note extension points unknown to the core, which other plugins may define."""
    unknown = sorted({*plugin.manifest.provides} - {*POINTS}) if plugin.manifest else []
    words = f"{', '.join(unknown)}: not extension points of vox, which ignores them"
    return (Check("provides", True, words),) if unknown else ()


def _hardware(plugins: Sequence[Found], environ: Mapping[str, str]) -> dict[str, tuple[Check, ...]]:
    probed = [plugin for plugin in plugins if plugin.manifest and plugin.manifest.probe]
    checks: dict[str, tuple[Check, ...]] = {}
    results = probe_all(probed, environ)
    for plugin in probed:
        checks[plugin.id] = (_hardware_check(plugin, results[plugin.id]),)
    return checks


def _hardware_check(plugin: Found, found: Hardware | ProbeFault) -> Check:
    if isinstance(found, ProbeFault):
        return Check("hardware", False, found.reason, remedies.probe(plugin, found.reason))
    if found.present:
        return Check("hardware", True, found.detail)
    tag = plugin.manifest.requires.hardware_tag if plugin.manifest else None
    look = f"if this machine has it: {remedies.hardware(tag)}"
    return Check("hardware", False, f"{ABSENT}{found.detail}", look)


# --- by the plugin, in a process of its own -------------------------------------------------------


def _own_checks(plugins: Sequence[Found], limit_s: float) -> dict[str, tuple[Check, ...]]:
    if not plugins:
        return {}
    with ThreadPoolExecutor(max_workers=CHILDREN) as pool:
        results = pool.map(lambda plugin: _ask(plugin, limit_s), plugins)
        return {plugin.id: checks for plugin, checks in zip(plugins, results, strict=True)}


def _ask(plugin: Found, limit_s: float) -> tuple[Check, ...]:
    request = {"id": plugin.id, "path": sys.path}
    command = [sys.executable, "-P", "-c", _CHILD]
    try:
        answer = output_of(command, limit_s, json.dumps(request).encode())
        return TypeAdapter(tuple[Check, ...]).validate_json(answer)
    except Failed as fault:
        return (Check("code", False, f"its code {fault}", remedies.authors(plugin)),)
    except ValidationError:  # the plugin exited with code 0
        remedy = remedies.authors(plugin)
        return (Check("code", False, "its code ended the process", remedy),)
