"""Which documents make which step, and how they reach a backend.

The order is a pure function of (rows, seed, step): no state is carried from step to step, so a run
resumes at any step, on any backend, without replaying anything. Each epoch is a permutation of all
documents; steps cut the endless row of epochs into pieces of `batch_size`, so the last step of an
epoch is filled up from the next. With fewer rows than `batch_size` a step is one epoch.

Permutations are the stable sort of Philox's raw output, keyed by (seed, epoch): numpy promises that
the raw stream never changes, and promises nothing for `Generator.permutation`. Philox: Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

Shape legend: T tokens of a batch, D documents of a batch, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from vox_core.contract import Batch
from vox_core.data.dataset import Dataset
from vox_core.data.documents import Documents
from vox_core.data.encode import Document

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.contract import Ints


@lru_cache(maxsize=2)  # steps ask for the same epoch over and over
def epoch_order(rows: int, seed: int, epoch: int) -> Ints:
    """The permutation of `rows` in an epoch (from 0); int64 (N,). `seed` is in [0, 2**64)."""
    raw_N = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(rows)
    return np.argsort(raw_N, kind="stable").astype(np.int64)


def steps_for(rows: int, batch_size: int, epochs: float) -> int:
    """Steps in which every document is seen `epochs` times, the last one filled up."""
    return math.ceil(round(epochs * rows / min(batch_size, rows), 9))  # 0.1 * 3 is above 0.3


def epochs_after(rows: int, batch_size: int, step: int) -> float:
    """Epochs finished after `step` (from 1), as a fraction."""
    return step * min(batch_size, rows) / rows


def documents_of_step(rows: int, batch_size: int, seed: int, step: int) -> Ints:
    """Indices of the documents of `step` (from 1); int64, min(batch_size, rows) of them."""
    size = min(batch_size, rows)
    first = (step - 1) * size
    epoch, offset = divmod(first, rows)
    order = epoch_order(rows, seed, epoch)[offset : offset + size]
    if missing := size - len(order):
        order = np.concatenate([order, epoch_order(rows, seed, epoch + 1)[:missing]])
    return order


def micro_batches(documents: Sequence[Document], micro_batch_tokens: int) -> list[list[int]]:
    """Group documents, by index, so that each group fits when padded.

    Longest first, neighbours in length together: a group of n whose longest document has L tokens
    has n * L <= `micro_batch_tokens`, or n = 1. Every index occurs once; ties keep their order.
    """
    return _groups([len(document) for document in documents], micro_batch_tokens)


def _groups(lengths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for index in longest_first:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= micro_batch_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def to_batch(documents: Sequence[Document]) -> Batch:
    """Lay documents end to end, and shift: position t predicts the token after it.

    The last position of a document has target 0 and weight 0.
    """
    bounds_D1 = np.cumsum([0, *(len(document) for document in documents)], dtype=np.int64)
    tokens_T = np.concatenate([document.tokens_T for document in documents]).astype(np.int64)
    weights_T = np.concatenate([document.weights_T for document in documents]).astype(np.float32)
    last_D = bounds_D1[1:] - 1
    return Batch(
        tokens_T=tokens_T,
        targets_T=_shifted(tokens_T, last_D),
        weights_T=_shifted(weights_T, last_D),
        starts_D=bounds_D1[:-1],
    )


def make_step_batches(
    dataset: Dataset, step: int, *, batch_size: int, micro_batch_tokens: int, seed: int
) -> tuple[tuple[Batch, ...], float]:
    """The micro-batches of `step` (from 1), and the sum of weights over all of them.

    `micro_batch_tokens` changes how the documents are grouped, never which they are.
    """
    chosen = documents_of_step(len(dataset.documents), batch_size, seed, step)
    return cut([dataset.documents[index] for index in chosen], micro_batch_tokens)


def cut(documents: Sequence[Document], micro_batch_tokens: int) -> tuple[tuple[Batch, ...], float]:
    """A step's documents as micro-batches, and the sum of weights over all of them."""
    groups = micro_batches(documents, micro_batch_tokens)
    batches = tuple(to_batch([documents[index] for index in group]) for group in groups)
    return batches, math.fsum(float(batch.weights_T.sum(dtype=np.float64)) for batch in batches)


def validation_batches(dataset: Dataset, micro_batch_tokens: int) -> Sequence[Batch]:
    """Every document once; a batch is made when it is asked for."""
    return _Batches(dataset.documents, micro_batch_tokens)


class _Batches(Sequence[Batch]):
    """Micro-batches of documents that may not fit into memory."""

    def __init__(self, documents: Documents, micro_batch_tokens: int) -> None:
        self._documents = documents
        self._groups = _groups(documents.lengths_D.tolist(), micro_batch_tokens)

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return tuple(self._made(group) for group in self._groups[index])
        return self._made(self._groups[index])

    def _made(self, group: Sequence[int]) -> Batch:
        return to_batch([self._documents[index] for index in group])


def _shifted(values_T: NDArray[Any], last_D: Ints) -> NDArray[Any]:
    """Each value at the position before its own; 0 at the last position of a document."""
    shifted_T = np.empty_like(values_T)
    shifted_T[:-1] = values_T[1:]
    shifted_T[last_D] = 0
    return shifted_T
