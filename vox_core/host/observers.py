"""Plugins that watch a run: told of every event, and never able to end it.

Each installed plugin with the extension point `Observer` is loaded by itself. One that cannot be
loaded, or that raises from `vox_event`, is told of once and dropped; what it prints goes to stderr.
The user's own Ctrl-C passes; whatever else an observer raises does not.

An observer runs in the run's own process: one that blocks or crashes it is beyond this.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import FrameType

from vox_core.contract import Event
from vox_core.errors import BackendError
from vox_core.host.blocked import blocked_plugins
from vox_core.host.discover import Found, discover
from vox_core.host.load import broken, load_plugin, told
from vox_core.host.machine import Machine, this_machine, unmet


class Observers:
    """Those of a run."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Load them. What goes wrong with one is kept for the first call of `tell`."""
        self._listening: list[_Observer] = []
        self._faults: list[str] = []
        plugins = discover()
        blocked = blocked_plugins([plugin.id for plugin in plugins], environ)
        machine = this_machine(plugins)
        for plugin in plugins:
            if plugin.id not in blocked and _observes(plugin):
                self._admit(plugin, machine)

    def tell(self, event: Event) -> list[str]:
        """Tell them all; gives what has gone wrong since the last call, one line for each that was
        dropped."""
        for observer in list(self._listening):
            if fault := _failure(observer, event):
                self._listening.remove(observer)
                self._faults.append(f"observer {observer.id!r} failed and was dropped: {fault}")
        faults, self._faults = self._faults, []
        return faults

    def _admit(self, plugin: Found, machine: Machine) -> None:
        try:
            self._listening.append(_load(plugin, machine))
        except BackendError as fault:
            self._faults.append(f"observer {plugin.id!r} is left out: {fault.found}")


@dataclass(frozen=True, slots=True)
class _Observer:
    id: str
    hear: Callable[..., object]


def _observes(plugin: Found) -> bool:
    return plugin.manifest is not None and "Observer" in plugin.manifest.extension_points


def _load(plugin: Found, machine: Machine) -> _Observer:
    assert plugin.manifest is not None, plugin.id
    if requirement := unmet(plugin.manifest, machine):
        raise broken(plugin, ": ".join(requirement))
    hook = load_plugin(plugin).hook.vox_event
    if not hook.get_hookimpls():
        raise broken(plugin, "no vox_event", "vox_event, marked with @hookimpl")
    return _Observer(plugin.id, hook)


def _failure(observer: _Observer, event: Event) -> str:
    """What it raised, in words; empty if nothing."""
    with _interrupts() as interrupted:
        try:
            with redirect_stdout(sys.stderr):
                observer.hear(event=event)
        except BaseException as error:  # SystemExit and the like must not end a run
            if isinstance(error, KeyboardInterrupt) and interrupted():
                raise
            return told(error)
    return ""


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT has come meanwhile: a `KeyboardInterrupt` without it is not the user's.

    Signals reach the main thread alone; in any other there is nothing to watch.
    """
    came = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield came.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.set()
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, before)
