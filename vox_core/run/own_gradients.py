"""The gradients of a step in a loop of one's own (open_trainer.py).

Shape legend: T tokens of a batch, K trained positions of a document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from vox_core.contract import Batch, Objective, Place, Trainer
from vox_core.errors import ConfigError
from vox_core.run.learner import micro_batch_seed
from vox_core.run.objective import totals_of, weigh, weighted
from vox_core.run.own_documents import Given

if TYPE_CHECKING:
    from vox_core.contract import Floats

Groups: TypeAlias = Sequence[Sequence[Place]]


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """The result of `forward_backward`.

    Args:
        loss: of these documents: the weighted mean of the negative log-likelihood, or what the
            objective computes.
        log_probs: of each document, float32 (K,), before the update.
        metrics: of the objective.
    """

    loss: float
    log_probs: list[Floats]
    metrics: Mapping[str, float] = field(default_factory=dict)


class Pending:
    """The gradients of one learner since its last step.

    Args:
        seed: of the dropout.
        reference: adapter that an objective compares with; None: the base.

    Attributes:
        finite: whether every loss was.
    """

    def __init__(self, trainer: Trainer, name: str, seed: int, reference: str | None) -> None:
        self._trainer, self._name, self._seed, self._reference = trainer, name, seed, reference
        self._clear()

    def _clear(self) -> None:
        self.finite: bool = True
        self._micro_batches: int = 0
        self._supervised: float = 0.0
        self._kinds: set[bool] = set()

    def add(
        self, batches: Sequence[Batch], groups: Groups, objective: Objective | None, step: int
    ) -> Gradients:
        """Accumulate the gradients of some documents; an error discards those of the whole step."""
        first = self._micro_batches
        self._micro_batches += len(batches)
        seeds = [micro_batch_seed(self._seed, step, n) for n in range(first, self._micro_batches)]
        self._kinds.add(objective is None)
        try:
            if objective is None or isinstance(objective, Given):
                made = self._in_one_pass(batches, groups, objective, seeds)
            else:
                made = self._in_two_passes(batches, groups, objective, seeds)
        except BaseException:
            self._trainer.discard(self._name)
            self._clear()
            raise
        self.finite = self.finite and math.isfinite(made.loss)
        return made

    def total_weight(self, given: float | None) -> float:
        """Return what divides the gradients.

        Raises:
            ConfigError: C004, there are none, or of two kinds without a divisor given.
        """
        if not self._kinds:
            raise ConfigError(
                "C004",
                "there are no gradients to apply",
                where="optim_step",
                remedy="call forward_backward before each optim_step",
            )
        if given is None and len(self._kinds) > 1:
            raise ConfigError(
                "C004",
                "supervised gradients are divided by their weights, others are not",
                where="optim_step",
                found="both since the last step",
                remedy="give total_weight, or call optim_step between them",
            )
        return given or (self._supervised if True in self._kinds else 1.0)

    def _in_one_pass(
        self,
        batches: Sequence[Batch],
        groups: Groups,
        objective: Given | None,
        seeds: Sequence[int],
    ) -> Gradients:
        """With weights that do not depend on the log-probabilities."""
        weights = [batch.weights_T for batch in batches]
        if objective is not None:
            nothing = [0 * weights_T for weights_T in weights]
            totals = totals_of(batches, groups)
            weights = list(weigh(objective, batches, groups, nothing, totals).weights)
        scores, loss = [], 0.0
        for batch, weights_T, seed in zip(batches, weights, seeds, strict=True):
            changed = replace(batch, weights_T=weights_T)
            scores.append(
                self._trainer.accumulate(changed, seed, self._name)
                if weights_T.any()
                else self._trainer.log_probs(changed, self._name, seed)
            )
            loss -= float((weights_T.astype(float) * scores[-1]).sum())
        if objective is None:
            total = sum(float(weights_T.astype(float).sum()) for weights_T in weights)
            self._supervised += total
            loss /= total
        return Gradients(loss, by_document(batches, groups, scores))

    def _in_two_passes(
        self, batches: Sequence[Batch], groups: Groups, objective: Objective, seeds: Sequence[int]
    ) -> Gradients:
        scores = [
            self._trainer.log_probs(batch, self._name, seed)
            for batch, seed in zip(batches, seeds, strict=True)
        ]
        if "reference" in objective.needs:
            groups = self._with_reference(batches, groups)
        outcome = weigh(objective, batches, groups, scores, totals_of(batches, groups))
        for batch, weights_T, seed in zip(batches, outcome.weights, seeds, strict=True):
            if weights_T.any():
                self._trainer.accumulate(weighted(batch, weights_T), seed, self._name)
        return Gradients(outcome.loss, by_document(batches, groups, scores), outcome.metrics)

    def _with_reference(self, batches: Sequence[Batch], groups: Groups) -> Groups:
        """Add the log-probabilities of the base, or of the adapter that training started from."""
        scores = [self._trainer.log_probs(batch, self._reference) for batch in batches]
        found = iter(by_document(batches, groups, scores))
        return [[replace(place, reference_K=next(found)) for place in group] for group in groups]


def by_document(batches: Sequence[Batch], groups: Groups, scores: Sequence[Floats]) -> list[Floats]:
    """Return the log-probabilities at each document's trained positions, in order."""
    return [
        scores[place.batch][place.extent][batches[place.batch].weights_T[place.extent] != 0]
        for group in groups
        for place in group
    ]
