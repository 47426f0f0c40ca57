"""What the core offers a backend while it works: events, checkpoints, the wish to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from vox_core.contract import CheckpointWritten, Event, TrainState, World
from vox_core.run import checkpoint
from vox_core.run.bad import require_finite

Observe: TypeAlias = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Observe nothing."""


@dataclass(slots=True)
class Context:
    """`vox_core.contract.RunContext` of a single process.

    Args:
        checkpoints: folder for them, or None for work that makes none.
        save_every: steps between checkpoints; 0 for none before the end.
        also_due: whether there is another reason for a checkpoint after a step.
        kept: steps whose checkpoints stay, however old.
        saved: the step of the newest checkpoint that was written here.
    """

    seed: int
    scratch: Path
    observe: Observe = ignore
    checkpoints: Path | None = None
    contract: str = ""
    backend: str = ""
    save_every: int = 0
    also_due: Callable[[int], bool] = lambda _: False
    kept: Callable[[], Collection[int]] = tuple
    stop_requested: Callable[[], bool] = lambda: False
    world: World = field(default_factory=World)
    saved: int | None = None

    def emit(self, event: Event) -> None:
        self.observe(event)

    def checkpoint_due(self, step: int) -> bool:
        if self.checkpoints is None:
            return False
        return bool(self.save_every and not step % self.save_every) or self.also_due(step)

    def checkpoint(self, state: TrainState) -> None:
        assert self.checkpoints is not None, "checkpoint without checkpoint_due"
        if state.step == self.saved:
            return
        require_finite(state, self.checkpoints)
        started = time.perf_counter()
        path = checkpoint.save(
            self.checkpoints, state, self.contract, self.backend, keep=self.kept()
        )
        self.saved = state.step
        self.emit(CheckpointWritten(state.step, str(path), time.perf_counter() - started))
