"""What the core offers a backend while it works: events, checkpoints, the wish to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from vox_core.contract import Event, TrainState, World
from vox_core.run.writer import CheckpointWriter

Observe: TypeAlias = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Observe nothing."""


class StopSignal:
    """Set by the first SIGINT or SIGTERM; the second one interrupts at once."""

    def __init__(self) -> None:
        self._event = threading.Event()

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


@dataclass(slots=True)
class Context:
    """`vox_core.contract.RunContext` of a single process.

    Args:
        checkpoints: writes them, or None for work that makes none.
    """

    seed: int
    scratch: Path
    observe: Observe = ignore
    checkpoints: CheckpointWriter | None = None
    stop_requested: Callable[[], bool] = lambda: False
    world: World = field(default_factory=World)

    def emit(self, event: Event) -> None:
        self.observe(event)

    def checkpoint_due(self, step: int) -> bool:
        return self.checkpoints is not None and self.checkpoints.due(step)

    def checkpoint(self, state: TrainState) -> None:
        assert self.checkpoints is not None, "checkpoint without checkpoint_due"
        self.checkpoints.submit(state)
