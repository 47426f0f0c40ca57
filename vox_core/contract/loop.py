"""The way through a training job: what is the same on every backend, whatever computes a step.

A backend may go its own way; with `follow` it brings three functions, and steps, validation,
checkpoints and stopping come in the order that the core expects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from vox_core.contract.batch import Batch, Step
from vox_core.contract.events import StepDone, Validation
from vox_core.contract.jobs import RunContext, TrainJob, TrainResult
from vox_core.contract.state import TrainState
from vox_core.errors import TrainingError


class Stepper(Protocol):
    """What a backend computes."""

    def step(self, step: Step) -> StepDone:
        """Take one optimizer step."""
        ...

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Weighted mean loss over `batches`."""
        ...

    def state(self, step: int) -> TrainState:
        """Everything that a run needs to go on after `step`."""
        ...


def follow(job: TrainJob, context: RunContext, stepper: Stepper) -> TrainResult:
    """Take every step of the job, or stop when asked to."""
    last, stopped = job.start.step, False
    if last == 0 and job.validation:
        context.emit(Validation(last, stepper.evaluate(job.validation)))
    for step in job.steps:
        context.emit(stepper.step(step))
        last = step.number
        if step.evaluate:
            context.emit(Validation(last, stepper.evaluate(job.validation)))
        if context.checkpoint_due(last):
            context.checkpoint(stepper.state(last))
        if stopped := context.stop_requested():
            break
    return TrainResult(stepper.state(last), stopped and last < job.plan.contract.total_steps)


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The seed of a micro-batch's randomness: 63 bits of SHA-256 over the three numbers.

    Dropout drawn from it is the same on one process and on eight, before a resume and after it.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def not_finite(what: str, value: float) -> TrainingError:
    """The error for a number that is NaN or infinite."""
    return TrainingError(
        "T001",
        f"the {what} is not finite",
        found=value,
        remedy="the step was not applied; train again with a lower --lr, or with --dtype fp32",
    )
