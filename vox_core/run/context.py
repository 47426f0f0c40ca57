"""What the core offers a backend while it works, and the wish to stop.

A run stops after the step in which a signal came or its time was over; a second signal does not
wait for the end of the step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from vox_core.contract import Event, World

Observe: TypeAlias = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Observe nothing."""


@dataclass(frozen=True, slots=True)
class Context:
    """`vox_core.contract.RunContext` of a single process."""

    scratch: Path
    emit: Observe = ignore
    world: World = field(default_factory=World)


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal ended the run in the middle of a step.

    Args:
        run: its folder.
        step: the last step whose state was kept; None if there is none.
    """

    def __init__(self, run: Path, step: int | None) -> None:
        super().__init__()
        self.run, self.step = run, step


class StopSignal:
    """Set by the first SIGINT or SIGTERM; the second one interrupts at once.

    Args:
        acknowledge: called at the first one.
    """

    def __init__(self, acknowledge: Callable[[], None] = lambda: None) -> None:
        self._event, self._acknowledge = threading.Event(), acknowledge

    def __call__(self) -> bool:
        return self._event.is_set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Catch the signals meanwhile. Only a main thread can; elsewhere nothing is caught."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()
        with suppress(Exception):  # it may come in the middle of other output; words are not vital
            self._acknowledge()
