"""The training loop that all backends share: steps, validation, checkpoints, stopping, NaN steps.

A backend passes `follow` a `Stepper` of three functions, or implements the same order itself.
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
    """The computations of a backend: step, evaluate, state."""

    def step(self, step: Step) -> StepDone:
        """Take one optimizer step; computation before the update may be wrapped in `before_update`.

        Raises:
            NotFinite: T001; adapter, optimizer state, update count and gradients are unchanged.
        """
        ...

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Return the weighted mean loss over `batches`."""
        ...

    def state(self, step: int) -> TrainState:
        """Return everything needed to resume after `step`; `follow` sets `skipped`."""
        ...


def follow(job: TrainJob, context: RunContext, stepper: Stepper) -> TrainResult:
    """Take every step of the job, or stop on request.

    A step that raises `NotFinite` is reported as `StepSkipped`, and training continues. On
    `KeyboardInterrupt` within `before_update` the state after the previous step is complete, with
    all its events sent, and is passed to the context. Elsewhere a state may be half updated, or the
    validation of its step missing, and the newest checkpoint counts.
    """
    way = _Way(job, context, stepper)
    try:
        stopped = way.go()
    except _Untouched:
        context.checkpoint(way.state())
        raise
    return TrainResult(way.state(), stopped and way.step < job.plan.contract.total_steps)


class _Way:
    """The progress of a job through the loop."""

    def __init__(self, job: TrainJob, context: RunContext, stepper: Stepper) -> None:
        self._job, self._context, self._stepper = job, context, stepper
        self.step, self._skipped = job.start.step, job.start.skipped

    def state(self) -> TrainState:
        return replace(self._stepper.state(self.step), skipped=self._skipped)

    def go(self) -> bool:
        """Run the loop; return whether it was stopped."""
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
        done: StepDone | StepSkipped
        try:
            done = self._stepper.step(step)
        except NotFinite as error:
            done = StepSkipped(step.number, error.loss, error.grad_norm)
            self._skipped += 1
        self.step = step.number
        return done

    def _validate(self) -> None:
        loss = self._stepper.evaluate(self._job.validation)
        self._context.emit(Validation(self.step, loss))


class _Untouched(KeyboardInterrupt):
    """An interrupt within `before_update`, with the state unchanged."""


@contextmanager
def before_update() -> Iterator[None]:
    """Mark the part of a step that changes neither the adapter nor the optimizer state.

    An interrupt there loses only that step; an interrupt elsewhere loses everything after the
    newest checkpoint.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise _Untouched from error


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """Derive the random seed of a micro-batch: 63 bits of SHA-256 over the three numbers.

    So dropout does not depend on the number of processes, or on a resume.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class NotFinite(TrainingError):
    """The loss or the gradient of a step is NaN or infinite (T001).

    Args:
        loss: the step's.
        grad_norm: None if not computed.
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
