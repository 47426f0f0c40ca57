"""Run plugins that watch a run in processes of their own, which cannot stop or delay the run.

Each installed plugin that provides the hook `vox_event` has a child process (child.py), which
imports it while the run goes on, and a thread here, which sends it one event after another as a
line of JSON. An observer that raises, crashes, exits or hangs is reported once and dropped; the run
continues. The run's process imports no observer.

`tell` waits only at the end of a run: all observers together have `FINISH_S` seconds to handle
their remaining events.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict

from vox_core.contract import Event, RunEnd
from vox_core.host.blocked import blocked_plugins
from vox_core.host.discover import Found, discover
from vox_core.host.load import providers
from vox_core.host.process import child_command, signal_name

LOAD_S = 60.0
"""Time limit of a plugin's import; a tensor library from a cold disk may take half of it."""
EVENT_S = 10.0
"""Time limit of one `vox_event`."""
FINISH_S = 30.0
"""Time limit of the remaining events when the run ends, the plugin's own exit included."""
WAITING = 10_000
"""Length of an observer's queue: the events of `LOAD_S` at a hundred steps a second."""


class Observers:
    """The observers of a run."""

    def __init__(self, plugins: Sequence[Found] | None = None) -> None:
        """Start the observers; the next call of `tell` reports any failure.

        Args:
            plugins: those that are installed; by default, they are searched for.
        """
        self._listening: list[_Observer] = []
        installed = discover() if plugins is None else plugins
        blocked = blocked_plugins([each.id for each in installed])
        broken = (each.id for each in installed if each.fault and each.id not in blocked)
        self._faults = [f"plugin {id!r} is broken: vox plugin doctor {id}" for id in broken]
        for plugin in providers("hooks", "vox_event", installed):
            try:
                self._listening.append(_Observer(plugin.id))
            except OSError as error:
                self._faults.append(f"tracker {plugin.id!r} is left out: {error}")

    def tell(self, event: Event) -> list[str]:
        """Send an event to all observers; after the end of a run, wait until they have handled it.

        Returns:
            One line for each observer that failed and was dropped since the last call.
        """
        for observer in self._listening:
            observer.tell(event)
        if isinstance(event, RunEnd):
            self._finish()
        for observer in [each for each in self._listening if each.fault]:
            self._drop(observer)
        faults, self._faults = self._faults, []
        return faults

    def close(self) -> None:
        """Kill the remaining observers. May be called twice."""
        for observer in self._listening:
            observer.end()
        self._listening.clear()

    def _drop(self, observer: _Observer) -> None:
        self._listening.remove(observer)
        self._faults.append(f"tracker {observer.id!r} {observer.fault}")
        observer.end()

    def _finish(self) -> None:
        until = time.monotonic() + FINISH_S
        for observer in self._listening:
            observer.tell(None)
        for observer in list(self._listening):
            if not observer.ended(until) and not observer.fault:
                observer.fault = f"was dropped: it has not finished {FINISH_S:g} s after the run"
            if observer.fault:
                self._drop(observer)
        self.close()


class _Observer:
    """The process of one observer, and the thread that feeds it."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._fault = ""
        self._stage = "is left out"
        self._since, self._limit_s = time.monotonic(), LOAD_S
        self._waiting: queue.Queue[Event | None] = queue.Queue(WAITING)
        self._process = subprocess.Popen(
            child_command("listen", id, limit_s=2 * EVENT_S),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the run only
        )
        self._feeder = threading.Thread(target=self._feed, name=f"observer {id}", daemon=True)
        self._feeder.start()

    @property
    def fault(self) -> str:
        """The first failure as text; empty if none."""
        waited = time.monotonic() - self._since
        if not self._fault and self._limit_s and waited >= self._limit_s:
            self._fault = f"{self._stage}: no answer in {self._limit_s:g} s"
        return self._fault

    @fault.setter
    def fault(self, words: str) -> None:
        self._fault = self._fault or words

    def tell(self, event: Event | None) -> None:
        """Queue an event, or None for the end, without waiting."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self.fault = f"fell behind and was dropped: {WAITING} events wait for it"

    def ended(self, until: float) -> bool:
        """Wait for the end of the process, at most until a monotonic time or the first fault."""
        while self._feeder.is_alive() and not self.fault and time.monotonic() < until:
            self._feeder.join(0.05)
        return not self._feeder.is_alive()

    def end(self) -> None:
        """Kill the process and its children; no effect if it has ended."""
        if self._feeder.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)

    def _feed(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._process:  # waits for its end
            self._converse()
        if not self.fault and (self._limit_s or self._process.returncode):
            code = self._process.returncode
            how = f"ended with exit {code}" if code >= 0 else f"was ended by {signal_name(code)}"
            self.fault = f"{self._stage}: its process {how}"

    def _converse(self) -> None:
        if answered := self._hear():
            self._stage = "failed and was dropped"
        while answered and not self._fault and (event := self._waiting.get()) is not None:
            self._since, self._limit_s = time.monotonic(), EVENT_S
            self._say({"event": event.name, "fields": asdict(event)})
            answered = self._hear()

    def _say(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def _hear(self) -> bool:
        """Read an answer, "" or a failure; whether there was one."""
        assert self._process.stdout is not None
        if not (answer := self._process.stdout.readline()):
            return False
        self.fault = f"{self._stage}: {words}" if (words := json.loads(answer)) else ""
        self._limit_s = 0.0
        return True
