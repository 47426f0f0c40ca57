"""A learner that takes steps: losses, updates, skipped steps.

The loss of a supervised step is `sum(weight * nll) / total_weight`, summed in float64 from the
backend's log-probabilities; that of another is its objective's. A step whose loss or gradient norm
is not finite is not applied.

Of several processes each takes the whole step and computes a share of its batches, each batch with
the seed that it has in the whole step. What they compute is exchanged before it is added up, so
every process has the loss that one would have, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vox_core.contract import (
    Batch,
    Floats,
    Objective,
    OptimizerSpec,
    Place,
    Step,
    StepDone,
    StepSkipped,
    Trainer,
    TrainState,
    Update,
    World,
)
from vox_core.data.batching import share_of
from vox_core.errors import PlanError, TrainingError, WorkError
from vox_core.run.artifacts import versions
from vox_core.run.reference import adapter_digest
from vox_core.run.weighing import StepWeights, by_batch, mean_metrics, totals_of, weigh, weighted

if TYPE_CHECKING:
    from vox_core.run.run_plan import RunPlan

NAME = "adapter"
"""The name of the only learner of `vox train`."""


class Untouched(KeyboardInterrupt):
    """An interrupt before a step's update, while its batches are made or after; the state is that
    before the step."""

    before_update = True


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
        world: World = World(),  # noqa: B008 (frozen)
    ) -> None:
        self._world = world
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
            WorkError: with `before_update`, unless the update itself failed.
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
        try:
            norm = self._trainer.update(update, self._name)
        except TrainingError as error:
            error.before_update = error.code == "VOX-T006"  # the ranks' gradients come first
            raise
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
        own = range(self._world.rank, len(batches), self._world.size)
        if self._objective is not None:
            scored = {n: self._trainer.log_probs(batches[n], self._name) for n in own}
            log_probs, totals = self._exchanged(batches, scored), totals_of(batches, groups)
            return weigh(self._objective, batches, groups, log_probs, totals).loss
        losses, weights = dict[int, float](), dict[int, float]()
        for n in own:
            batch = batches[n]
            losses[n] = _loss(batch, self._trainer.log_probs(batch, self._name))
            weights[n] = float(batch.weights_T.sum())
        return self._sum(losses, len(batches)) / self._sum(weights, len(batches))

    def any_of(self, asked: Callable[[], bool]) -> bool:
        """Whether any process says so; all of them have to ask."""
        with before_update():
            return bool(self._sum({self._world.rank: float(asked())}, self._world.size))

    def _accumulated(self, step: Step) -> float:
        """Accumulate the gradient of a step; return its loss."""
        batches = step.batches
        seeds = [micro_batch_seed(self._seed, step.number, n) for n in range(len(batches))]
        if self._objective is not None:
            compare = self._in_one_pass if self._one_pass else self._in_two_passes
            return compare(self._objective, step, seeds)
        losses = {
            n: _loss(batches[n], self._trainer.accumulate(batches[n], seeds[n], self._name))
            for n in self._own(step)
        }
        return self._sum(losses, len(batches)) / step.total_weight

    def _in_two_passes(self, objective: Objective, step: Step, seeds: Sequence[int]) -> float:
        batches = step.batches
        own = self._own(step)
        scored = {n: self._trainer.log_probs(batches[n], self._name, seeds[n]) for n in own}
        log_probs = self._exchanged(batches, scored)
        if self._check:
            self._check(step, log_probs)
        totals = totals_of(batches, step.groups)
        outcome = weigh(objective, batches, step.groups, log_probs, totals)
        for n in own:
            if (weights_T := outcome.weights[n]).any():
                scaled_T = weights_T * float(step.total_weight)
                self._trainer.accumulate(weighted(batches[n], scaled_T), seeds[n], self._name)
        self.metrics = outcome.metrics
        return outcome.loss

    def _in_one_pass(self, objective: Objective, step: Step, seeds: Sequence[int]) -> float:
        totals, batches = totals_of(step.batches, step.groups), step.batches
        groups, outcomes = [*by_batch(step.groups, len(batches))], dict[int, StepWeights]()
        scored: dict[int, Floats] = {}
        for n in self._own(step):

            def weights_of(log_probs_T: Floats) -> Floats:
                found = weigh(objective, [batches[n]], groups[n], [log_probs_T], totals)  # noqa: B023
                outcomes[n] = found  # noqa: B023
                return found.weights[0] * float(step.total_weight)

            scored[n] = self._trainer.accumulate(batches[n], seeds[n], self._name, weights_of)
        log_probs = self._exchanged(batches, scored)
        in_order = [
            outcomes.get(n) or weigh(objective, [batch], groups[n], [log_probs[n]], totals)
            for n, batch in enumerate(batches)
        ]
        self.metrics = mean_metrics(in_order)
        return sum(outcome.loss for outcome in in_order)

    def _own(self, step: Step) -> range:
        return share_of([len(batch.tokens_T) for batch in step.batches], self._world)

    def _sum(self, values: Mapping[int, float], count: int) -> float:
        """Sum `count` values, of which this process has some, in their order."""
        values_N = np.zeros(count)
        values_N[[*values]] = [*values.values()]
        total: float = sum(self._trainer.share(values_N).tolist(), 0.0)
        return total

    def _exchanged(self, batches: Sequence[Batch], own: Mapping[int, Floats]) -> list[Floats]:
        """Return the log-probabilities of all batches, of which this process has some."""
        if self._world.size == 1:
            return [own[n] for n in range(len(batches))]
        bounds = np.cumsum([0, *(batch.targets_T.size for batch in batches)])
        flat_N = np.zeros(bounds[-1])
        for n, log_probs_T in own.items():
            flat_N[bounds[n] : bounds[n + 1]] = log_probs_T.ravel()
        shared_N = self._trainer.share(flat_N).astype(np.float32)
        parts = zip(np.split(shared_N, bounds[1:-1]), batches, strict=True)
        return [part.reshape(batch.targets_T.shape) for part, batch in parts]

    def _skip(self, step: Step, loss: float, norm: float | None = None) -> StepSkipped:
        self.step = step.number
        self._skipped += 1
        return StepSkipped(step.number, loss, norm)


def facts_of(plan: RunPlan, start: TrainState) -> dict[str, str]:
    """Return what all ranks of a run have to have in common, by name."""
    made = plan.execution
    settings = {key: value for key, value in made.to_json().items() if key != "device"}
    settings["shard"] = plan.settings.shard
    return {
        "versions of Python, vox or a library": json.dumps(versions(plan.inputs.backend)),
        "data": f"{made.contract.data.digest} {made.contract.data.valid_digest}",
        "model": f"{made.contract.model.weights_digest} {made.contract.model.tokenizer_digest}",
        "settings": json.dumps(settings, sort_keys=True),
        "step and weights at the start": adapter_digest(
            f"{start.step} {start.skipped}", start.adapter
        ),
    }


def require_same(trainer: Trainer, world: World, facts: Callable[[], Mapping[str, str]]) -> None:
    """Refuse to train with ranks that would not train the same (P013); they compare digests."""
    if world.size == 1:
        return
    mine = {name: hashlib.sha256(text.encode()).digest() for name, text in facts().items()}
    sent_RB = np.zeros((world.size, 32 * len(mine)))
    sent_RB[world.rank] = [*b"".join(mine.values())]
    found_RFB = trainer.share(sent_RB.ravel()).reshape(world.size, len(mine), 32)
    differs_RF = (found_RFB != found_RFB[0]).any(-1)
    if differs_RF.any():
        wrong = [
            (name, rank) for n, name in enumerate(mine) for rank in differs_RF[:, n].nonzero()[0]
        ]
        raise PlanError(
            "P013",
            "the processes of the run differ",
            found=f"this is rank {world.rank} of {world.size}",
            faults=[f"{name}: rank {rank} differs from rank 0" for name, rank in wrong],
            remedy="give every machine the same version of vox, data, model and run folder",
        )


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """Derive the random seed of a micro-batch: 63 bits of SHA-256 over the three numbers.

    So dropout does not depend on the number of processes, or on a resume.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _loss(batch: Batch, log_probs_T: Floats) -> float:
    """Return `sum(weight * nll)`, summed in float64."""
    return -float(np.dot(batch.weights_T.astype(np.float64), log_probs_T.astype(np.float64)))


@contextmanager
def before_update() -> Iterator[None]:
    """Turn an interrupt into `Untouched`, and mark a WorkError."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Untouched from error
    except WorkError as error:
        error.before_update = True
        raise
