"""The child processes of doctor.py and observers.py, each with one plugin.

`answer` imports the plugin, calls its `vox_doctor` and prints a JSON list of checks. `listen`
imports an observer and calls it with each event from stdin; after the import and after each event
it prints one JSON string, the fault or "". Only this module writes to stdout; what the plugin
prints goes to stderr.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TextIO

from vox_core.contract import Check, Event
from vox_core.errors import BackendError, VoxError
from vox_core.host.discover import Found, discover
from vox_core.host.load import POINTS, format_error, load_command, load_plugin, section_of
from vox_core.host.manifest import Manifest
from vox_core.text import hint

_BACKEND = ("vox_load", "vox_merge", "vox_train")


def answer(request: dict[str, Any]) -> None:
    """Check the plugin with the id in `request`, and print the checks as JSON."""
    with _own_stdout() as file:
        json.dump([asdict(check) for check in _checks(_plugin(request))], file)


def listen(request: dict[str, Any]) -> None:
    """Call the observer with the id in `request` with each event on stdin, until one fails.

    If vox dies while the observer hangs, this process exits `limit_s` after the event arrived.
    """
    events, answers = _own_stdin(), _own_stdout()
    hear, words = _loaded(_plugin(request))
    kinds = {kind.name: kind for kind in Event.__subclasses__()}
    print(json.dumps(words), file=answers, flush=True)
    while hear and not words and (line := events.readline()):
        faulthandler.dump_traceback_later(request["limit_s"], exit=True)
        event = json.loads(line)
        kind = kinds.get(event["event"])  # None: an event of the backend's own
        words = _failure(hear, kind(**event["fields"])) if kind else ""
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(words), file=answers, flush=True)


def _own_stdout() -> TextIO:
    """Redirect stdout to stderr, and return the original stdout."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(stdout, "w", encoding="utf-8")


def _own_stdin() -> TextIO:
    """Redirect stdin to /dev/null, and return the original stdin."""
    stdin, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return os.fdopen(stdin, encoding="utf-8")


def _plugin(request: dict[str, Any]) -> Found:
    (found,) = (plugin for plugin in discover() if plugin.id == request["id"])
    return found


def _loaded(found: Found) -> tuple[Callable[..., object] | None, str]:
    """Return the observer's `vox_event`, or the reason why it cannot be loaded."""
    try:
        hook = load_plugin(found).hook.vox_event
    except BackendError as fault:
        return None, _said(fault)
    except KeyboardInterrupt as error:  # its own: the user's does not come here
        return None, format_error(error)
    return (hook, "") if hook.get_hookimpls() else (None, "no vox_event, marked with @hookimpl")


def _failure(hear: Callable[..., object], event: Event) -> str:
    """Call the observer; return its exception as text, or ""."""
    try:
        hear(event=event)
    except BaseException as error:  # noqa: BLE001 - a plugin may raise anything at all
        return format_error(error)
    return ""


def _checks(found: Found) -> list[Check]:
    try:
        hooks = load_plugin(found).hook
    except BackendError as fault:
        return [Check("code", False, _said(fault), found.upgrade_or_report)]
    implemented = [name for name in vars(hooks) if getattr(hooks, name).get_hookimpls()]
    checks = [Check("code", True, f"loads; has {', '.join(sorted(implemented)) or 'no hooks'}")]
    if found.manifest:
        if faults := [*_undeclared(found.manifest, hooks, {*implemented})]:
            checks.append(Check("hooks", False, "; ".join(faults), found.upgrade_or_report))
        for command in found.manifest.commands:
            with _noted(checks, "command", f"vox {command.name}", found):
                load_command(found, command.entry)
        for name in found.manifest.provides.get("settings", ()):
            with _noted(checks, "settings", f"[{name}] of vox.toml", found):
                section_of(found, name)
    try:
        own = [check for result in hooks.vox_doctor() for check in _checked(result)]
    except VoxError as error:  # in the user's terms already: a setting, a missing library
        said = ": ".join(part for part in (error.what, error.where, error.found) if part)
        own = [Check("vox_doctor", False, said, error.remedy)]
    except BaseException as error:  # noqa: BLE001 - a plugin may raise anything at all
        own = [Check("vox_doctor", False, format_error(error), "report it to the plugin's authors")]
    return [*checks, *own]


def _undeclared(manifest: Manifest, hooks: object, has: set[str]) -> Iterator[str]:
    """Compare the code's hooks with the manifest; optional ones of a newer vox have no spec."""
    points = {hook for point, hook in POINTS.items() if manifest.provides.get(point)}
    declared = points.union(manifest.provides.get("hooks", ()), _BACKEND * manifest.is_backend)
    known = vars(hooks)
    if lacking := [f"{n}{'' if n in known else hint(n, known)}" for n in sorted(declared - has)]:
        yield f"the manifest needs {', '.join(lacking)}, marked with @hookimpl"
    if idle := [n for n in has - declared - {"vox_doctor"} if getattr(hooks, n).has_spec()]:
        yield f"{', '.join(sorted(idle))}: never called, as the manifest does not declare it"


@contextmanager
def _noted(checks: list[Check], kind: str, what: str, found: Found) -> Iterator[None]:
    """Append a failed check if the block raises a `VoxError`."""
    try:
        yield
    except VoxError as fault:
        checks.append(Check(kind, False, f"{what}: {_said(fault)}", found.upgrade_or_report))


def _said(fault: VoxError) -> str:
    expected = f"; expected {fault.expected}" if fault.expected else ""
    return f"{fault.found or fault.what}{expected}"


def _checked(result: Iterable[object]) -> Iterable[Check]:
    for check in result:
        if not isinstance(check, Check):
            raise TypeError(f"vox_doctor gave {type(check).__name__}, expected Check")
        yield check
