"""Batches and steps of tokenised documents for a backend, and the arrays that cross the seam.

Shape legend: T tokens of a batch, D documents of a batch, K trained positions of a document, M
targets of a position.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float32]"
Doubles: TypeAlias = "NDArray[np.float64]"
Ints: TypeAlias = "NDArray[np.int64]"
Bools: TypeAlias = "NDArray[np.bool_]"


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokenised documents concatenated into one sequence.

    Args:
        tokens_T: int64 token ids.
        targets_T: int64; `targets_T[t]` is the token that follows `tokens_T[t]` in its document
            (0 at the last position of a document, whose weight is 0).
        weights_T: float32; the gradient of `-sum(weights_T * log p(target))` is taken, so a weight
            may be negative. 0 = not trained.
        starts_D: int64 offset of each document's first token; `starts_D[0] == 0`.
        scored_T: bool, where log-probabilities are wanted. Left out, they are wanted where
            something is trained; trained positions are always among them.

    With the capability `several-targets`, targets, weights, scores and log-probabilities may be
    (T, M): M targets at each position, whose gradients add up.

    A backend may pack or pad documents. They never attend to one another, and the loss does not
    depend on the layout.
    """

    tokens_T: Ints
    targets_T: Ints
    weights_T: Floats
    starts_D: Ints
    scored_T: Bools = None  # type: ignore[assignment]  # set below, never None outside

    def __post_init__(self) -> None:
        trained_T = self.weights_T != 0
        scored_T = cast("Bools | None", self.scored_T)
        scored_T = trained_T if scored_T is None else scored_T | trained_T
        object.__setattr__(self, "scored_T", scored_T)

    @property
    def trained_T(self) -> Bools:
        """Bool (T,): where any weight is not 0."""
        trained_T: Bools = (self.weights_T != 0).reshape(len(self.tokens_T), -1).any(1)
        return trained_T

    def documents(self) -> Iterator[slice]:
        """Yield the extent of each document, in order."""
        bounds = [*self.starts_D.tolist(), len(self.tokens_T)]
        return itertools.starmap(slice, itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Position of a group's document in a step's batches.

    Args:
        label: what it is in its group, such as chosen.
        batch: index of its batch.
        extent: its positions there.
        reference_K: float32, the log-probabilities of the reference model, or the teacher, at its
            trained positions, (K,) or (K, M); None unless the objective needs them.
        sampled_K: float32, those when it was sampled; None unless it was.
        reward: of a sampled one.
    """

    label: str
    batch: int
    extent: slice
    reference_K: Floats | None = None
    sampled_K: Floats | None = None
    reward: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The micro-batches of one optimizer step.

    Args:
        number: from 1.
        batches: of the whole step; each rank computes its share of them.
        total_weight: divides the step's gradients, and its loss: the sum of weights over the whole
            step on all ranks, so that the loss is `sum(weight * nll) / total_weight`. An
            objective's weights are multiplied by it first; its loss is not divided.
        lr: learning rate of this step, schedule applied.
        evaluate: run validation after this step.
        groups: the documents that an objective compares; empty in supervised training.
    """

    number: int
    batches: tuple[Batch, ...]
    total_weight: float
    lr: float
    evaluate: bool = False
    groups: tuple[tuple[Place, ...], ...] = ()


def probe_document(batches: Sequence[Batch]) -> Batch:
    """Return the longest document's first 512 tokens, for a backend to verify its computation; 64
    positions, spread evenly, have weight 1 and the others 0."""
    import numpy as np

    batch, extent = max(
        ((batch, extent) for batch in batches for extent in batch.documents()),
        key=lambda found: found[1].stop - found[1].start,
    )
    stop = min(extent.stop, extent.start + 512)
    weights_T = np.zeros(stop - extent.start, np.float32)
    # The last position of a whole document has no target.
    last = stop - extent.start - 1 - (stop == extent.stop)
    weights_T[np.linspace(0, last, 64).astype(np.int64)] = 1
    at = slice(extent.start, stop)
    return Batch(batch.tokens_T[at], batch.targets_T[at], weights_T, np.zeros(1, np.int64))


def padded_groups(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Group documents by index so that each group, padded to its longest, fits `tokens`.

    Longest first, neighbours in length together: a group of n whose longest document has L tokens
    has n * L <= `tokens`, or n = 1. Every index occurs once; ties keep their order.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for index in longest_first:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
