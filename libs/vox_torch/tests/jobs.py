"""Training with the engine in this process, on the work of `vox_testing.jobs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vox_core.contract import (
    Event,
    ExecutionPlan,
    Step,
    StepDone,
    TrainJob,
    TrainState,
    World,
    probe_document,
)
from vox_core.run.learner import Learner
from vox_testing.jobs import batch, documents, plan, start, step
from vox_torch.profile import DeviceProfile
from vox_torch.train import TorchTrainer

__all__ = ["batch", "documents", "losses", "open_trainer", "plan", "start", "step", "train"]


class Context:
    """What a trainer reports, kept."""

    world = World()

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def open_trainer(
    folder: Path,
    made: ExecutionPlan | None = None,
    *,
    steps: Sequence[Step] = (),
    profile: DeviceProfile | None = None,
) -> tuple[TorchTrainer, list[Event]]:
    """Return a trainer without learners, and the events that it will report."""
    context = Context()
    document = probe_document(steps[0].batches) if steps else None
    job = TrainJob(made or plan(folder), folder, document)
    return TorchTrainer(job, context, profile or DeviceProfile("cpu")), context.events


def train(
    folder: Path,
    steps: Sequence[Step],
    made: ExecutionPlan | None = None,
    state: TrainState | None = None,
    profile: DeviceProfile | None = None,
) -> tuple[TrainState, list[Event]]:
    """Train in this process; return the state and every event."""
    made = made or plan(folder, total_steps=steps[-1].number)
    trainer, events = open_trainer(folder, made, steps=steps, profile=profile)
    contract = made.contract
    learner = Learner(trainer, state or start(folder, made), contract.optimizer, contract.seed)
    for one in steps:
        events.append(learner.take(one))
    trained = learner.state()
    trainer.close()
    return trained, events


def losses(events: Sequence[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepDone)]
