"""What the core offers a backend while it works: events, checkpoints, the wish to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from vox_core.contract import Event, TrainState, World
from vox_core.run.writer import CheckpointWriter

Observe: TypeAlias = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Observe nothing."""


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
        if self.checkpoints is not None:  # an interrupt does not ask
            self.checkpoints.submit(state)
