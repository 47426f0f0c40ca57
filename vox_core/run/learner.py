"""A learner that takes steps: losses, updates, skipped steps.

The loss of a supervised step is `sum(weight * nll) / total_weight`, summed in float64 from the
backend's log-probabilities; that of another is its objective's. A step whose loss or gradient norm
is not finite is not applied.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from vox_core.contract import (
    Batch,
    Objective,
    OptimizerSpec,
    Place,
    Step,
    StepDone,
    StepSkipped,
    Trainer,
    TrainState,
    Update,
)
from vox_core.run.weighing import StepWeights, by_batch, mean_metrics, totals_of, weigh, weighted

if TYPE_CHECKING:
    from vox_core.contract import Floats

NAME = "adapter"
"""The name of the only learner of `vox train`."""


class Untouched(KeyboardInterrupt):
    """An interrupt before a step's update, while its batches are made or after; the state is that
    before the step."""


class Learner:
    """Takes optimizer steps with one learner of a trainer.

    Args:
        objective: None for supervised training.
        one_pass: the backend has this capability.
        check: called with each step and the log-probabilities of its batches, before they are
            weighed.

    Attributes:
        step: the last step taken, or skipped.
        metrics: what the objective measured in it.
    """

    def __init__(
        self,
        trainer: Trainer,
        start: TrainState,
        optimizer: OptimizerSpec,
        seed: int,
        name: str = NAME,
        objective: Objective | None = None,
        *,
        one_pass: bool = False,
        check: Callable[[Step, Sequence[Floats]], None] | None = None,
    ) -> None:
        self._trainer, self._optimizer, self._seed, self._name = trainer, optimizer, seed, name
        self._objective = objective
        self._check = check
        self._one_pass = (
            one_pass and check is None and objective is not None and objective.separable
        )
        self.metrics: Mapping[str, float] = {}
        self.step, self._skipped = start.step, start.skipped
        trainer.add_learner(name, start)

    def state(self) -> TrainState:
        """Return everything needed to resume after `step`."""
        return replace(self._trainer.state(self._name), step=self.step, skipped=self._skipped)

    def take(self, step: Step) -> StepDone | StepSkipped:
        """Take one optimizer step, or skip it.

        Raises:
            Untouched: interrupted before the update.
            TrainingError: T002, out of memory.
        """
        started = time.perf_counter()
        try:
            with before_update():
                loss = self._accumulated(step)
        except BaseException:
            self._trainer.discard(self._name)
            raise
        if not math.isfinite(loss):
            self._trainer.discard(self._name)
            return self._skip(step, loss)
        number = self.step - self._skipped + 1
        update = Update.of(self._optimizer, number, step.lr, step.total_weight)
        norm = self._trainer.update(update, self._name)
        if not math.isfinite(norm):
            return self._skip(step, loss, norm)
        self.step = step.number
        return StepDone(
            step=step.number,
            loss=loss,
            lr=step.lr,
            grad_norm=norm,
            tokens=sum(len(batch.tokens_T) for batch in step.batches),
            trained_tokens=sum(int(batch.trained_T.sum()) for batch in step.batches),
            seconds=time.perf_counter() - started,
            memory=self._trainer.peak_memory(),
        )

    def evaluate(self, batches: Sequence[Batch], groups: Sequence[Sequence[Place]] = ()) -> float:
        """Return the loss over `batches`, without dropout: its weighted mean, or the objective's.

        Args:
            groups: what the objective compares.
        """
        scored = (self._trainer.log_probs(batch, self._name) for batch in batches)
        if self._objective is not None:
            totals = totals_of(batches, groups)
            return weigh(self._objective, batches, groups, list(scored), totals).loss
        loss = sum(map(_loss, batches, scored))
        return loss / sum(float(batch.weights_T.sum()) for batch in batches)

    def _accumulated(self, step: Step) -> float:
        """Accumulate the gradient of a step; return its loss."""
        batches = step.batches
        seeds = [micro_batch_seed(self._seed, step.number, n) for n in range(len(batches))]
        if self._objective is not None:
            compare = self._in_one_pass if self._one_pass else self._in_two_passes
            return compare(self._objective, step, seeds)
        loss = 0.0
        for batch, seed in zip(batches, seeds, strict=True):
            loss += _loss(batch, self._trainer.accumulate(batch, seed, self._name))
        return loss / step.total_weight

    def _in_two_passes(self, objective: Objective, step: Step, seeds: Sequence[int]) -> float:
        batches = step.batches
        log_probs = [
            self._trainer.log_probs(batch, self._name, seed)
            for batch, seed in zip(batches, seeds, strict=True)
        ]
        if self._check:
            self._check(step, log_probs)
        totals = totals_of(batches, step.groups)
        outcome = weigh(objective, batches, step.groups, log_probs, totals)
        for batch, weights_T, seed in zip(batches, outcome.weights, seeds, strict=True):
            if weights_T.any():
                scaled_T = weights_T * float(step.total_weight)
                self._trainer.accumulate(weighted(batch, scaled_T), seed, self._name)
        self.metrics = outcome.metrics
        return outcome.loss

    def _in_one_pass(self, objective: Objective, step: Step, seeds: Sequence[int]) -> float:
        totals, outcomes = totals_of(step.batches, step.groups), list[StepWeights]()
        of_batches = by_batch(step.groups, len(step.batches))
        for batch, groups, seed in zip(step.batches, of_batches, seeds, strict=True):

            def weights_of(log_probs_T: Floats) -> Floats:
                outcome = weigh(objective, [batch], groups, [log_probs_T], totals)  # noqa: B023
                outcomes.append(outcome)
                return outcome.weights[0] * float(step.total_weight)

            self._trainer.accumulate(batch, seed, self._name, weights_of)
        self.metrics = mean_metrics(outcomes)
        return sum(outcome.loss for outcome in outcomes)

    def _skip(self, step: Step, loss: float, norm: float | None = None) -> StepSkipped:
        self.step = step.number
        self._skipped += 1
        return StepSkipped(step.number, loss, norm)


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """Derive the random seed of a micro-batch: 63 bits of SHA-256 over the three numbers.

    So dropout does not depend on the number of processes, or on a resume.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _loss(batch: Batch, log_probs_T: Floats) -> float:
    """Return `sum(weight * nll)`, summed in float64."""
    import numpy as np

    return -float(np.dot(batch.weights_T.astype(np.float64), log_probs_T.astype(np.float64)))


@contextmanager
def before_update() -> Iterator[None]:
    """Turn an interrupt into `Untouched`."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Untouched from error
