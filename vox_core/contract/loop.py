"""The way through a training job: what is the same on every backend, whatever computes a step.

A backend may go its own way; with `follow` it brings three functions, and steps, validation,
checkpoints, stopping and steps that went wrong come in the order that the core expects.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from vox_core.contract.batch import Batch, Step
from vox_core.contract.events import StepDone, StepSkipped, Validation
from vox_core.contract.jobs import RunContext, TrainJob, TrainResult
from vox_core.contract.state import TrainState
from vox_core.errors import TrainingError


class Stepper(Protocol):
    """What a backend computes."""

    def step(self, step: Step) -> StepDone:
        """Take one optimizer step; what is computed `before_update` may say so.

        Raises:
            NotFinite: T001, and nothing is left of the step: not in the adapter, the moments, the
                count of updates or the gradients.
        """
        ...

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Weighted mean loss over `batches`."""
        ...

    def state(self, step: int) -> TrainState:
        """Everything that a run needs to go on after `step`; `skipped` is `follow`'s to say."""
        ...


def follow(job: TrainJob, context: RunContext, stepper: Stepper) -> TrainResult:
    """Take every step of the job, or stop when asked to.

    A step that raises `NotFinite` is told as `StepSkipped`, and the next one is taken. Where
    `KeyboardInterrupt` ends it, the state after the step before is handed to the context if the
    stepper says that it is whole still (`before_update`): all that was to be told of that step has
    been. Anywhere else a state may be half updated, or a validation of its step missing, and the
    newest checkpoint counts.
    """
    way = _Way(job, context, stepper)
    try:
        stopped = way.go()
    except _Untouched:
        context.checkpoint(way.state())
        raise
    return TrainResult(way.state(), stopped and way.step < job.plan.contract.total_steps)


class _Way:
    """The way through a job, and how far it has been gone."""

    def __init__(self, job: TrainJob, context: RunContext, stepper: Stepper) -> None:
        self._job, self._context, self._stepper = job, context, stepper
        self.step, self._skipped = job.start.step, job.start.skipped

    def state(self) -> TrainState:
        return replace(self._stepper.state(self.step), skipped=self._skipped)

    def go(self) -> bool:
        """Whether it was stopped."""
        context = self._context
        if self.step == 0 and self._job.validation:
            self._validate()
        for step in self._job.steps:
            context.emit(self._take(step))
            if step.evaluate:
                self._validate()
            if context.checkpoint_due(self.step):
                context.checkpoint(self.state())
            if context.stop_requested():
                return True
        return False

    def _take(self, step: Step) -> StepDone | StepSkipped:
        done = _taken(self._stepper, step)
        self.step = step.number
        self._skipped += isinstance(done, StepSkipped)
        return done

    def _validate(self) -> None:
        loss = self._stepper.evaluate(self._job.validation)
        self._context.emit(Validation(self.step, loss))


def _taken(stepper: Stepper, step: Step) -> StepDone | StepSkipped:
    try:
        return stepper.step(step)
    except NotFinite as error:
        return StepSkipped(step.number, error.loss, error.grad_norm)


class _Untouched(KeyboardInterrupt):
    """An interrupt in a step that has changed nothing yet."""


@contextmanager
def before_update() -> Iterator[None]:
    """Around what a step computes before it changes the adapter or its moments.

    An interrupt there loses that step alone. A backend that does not say so loses what came after
    the newest checkpoint, and nothing else.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise _Untouched from error


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """The seed of a micro-batch's randomness: 63 bits of SHA-256 over the three numbers.

    Dropout drawn from it is the same on one process and on eight, before a resume and after it.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class NotFinite(TrainingError):
    """The loss or the gradient of a step is NaN or infinite (T001).

    Args:
        loss: the step's.
        grad_norm: None if it was not looked at.
    """

    def __init__(self, loss: float, grad_norm: float | None = None) -> None:
        self.loss, self.grad_norm = loss, grad_norm
        lost = not math.isfinite(loss)
        super().__init__(
            "T001",
            f"the {'loss' if lost else 'gradient norm'} is not finite",
            found=loss if lost else grad_norm,
            remedy="the step was not applied; train again with a lower --lr, or with --dtype fp32",
        )
