"""Training with the engine in this process, on the work of `vox_testing.jobs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vox_core.contract import (
    Batch,
    Event,
    ExecutionPlan,
    Step,
    StepDone,
    TrainJob,
    TrainResult,
    TrainState,
)
from vox_core.run.context import Context
from vox_testing.jobs import batch, documents, plan, start, step
from vox_torch.profile import DeviceProfile
from vox_torch.train import Trainer

__all__ = ["batch", "documents", "losses", "plan", "start", "step", "train"]


def train(
    folder: Path,
    steps: Sequence[Step],
    made: ExecutionPlan | None = None,
    state: TrainState | None = None,
    validation: Sequence[Batch] = (),
    **context: object,
) -> tuple[TrainResult, list[Event]]:
    """Train in this process; returns the result and every event."""
    made = made or plan(folder, total_steps=steps[-1].number)
    events: list[Event] = []
    job = TrainJob(made, folder, steps, state or start(folder, made), validation)
    working = Context(made.contract.seed, folder, events.append, **context)
    return Trainer(job, working, DeviceProfile("cpu")).run(), events


def losses(events: Sequence[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepDone)]
