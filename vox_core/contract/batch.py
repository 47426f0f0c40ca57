"""Documents on their way to a backend.

Shape legend: T tokens of a batch, D documents of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vox_core.contract.arrays import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Documents laid end to end.

    Args:
        tokens_T: int64 token ids.
        targets_T: int64; `targets_T[t]` is the token that follows `tokens_T[t]` in its document
            (0 at the last position of a document, whose weight is 0).
        weights_T: float32 weight of the loss at t; 0 = not trained.
        starts_D: int64 offset of each document's first token; `starts_D[0] == 0`.

    A backend may lay documents out as it likes; they never see one another, and the loss is the
    same whatever the layout.
    """

    tokens_T: Ints
    targets_T: Ints
    weights_T: Floats
    starts_D: Ints

    def documents(self) -> Iterator[slice]:
        """The extent of each document, in order."""
        bounds = [*self.starts_D.tolist(), len(self.tokens_T)]
        return itertools.starmap(slice, itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The micro-batches of one optimizer step.

    Args:
        number: from 1.
        batches: this process's share of the step.
        total_weight: sum of weights over the whole step on all ranks; the loss of the step is
            `sum(weight * nll) / total_weight`.
        lr: learning rate of this step, schedule applied.
        evaluate: run validation after this step.
        epoch: epochs finished after this step, as a fraction.
    """

    number: int
    batches: tuple[Batch, ...]
    total_weight: float
    lr: float
    evaluate: bool = False
    epoch: float = 0.0
