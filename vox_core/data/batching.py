"""Which documents make which step, and how they share micro-batches.

The order is a pure function of (rows, seed, step): no state is carried from step to step, so a run
resumes at any step, on any backend, without replaying anything. Each epoch is a permutation of all
documents; steps cut the endless row of epochs into pieces of `batch_size`, so the last step of an
epoch is filled up from the next. With fewer rows than `batch_size` a step is one epoch.

Permutations are the stable sort of Philox's raw output, keyed by (seed, epoch): numpy promises that
the raw stream never changes, and promises nothing for `Generator.permutation`. Philox: Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

A backend lays a micro-batch out as rows, padded to the longest, or end to end. What it computes at
once is bounded by `micro_batch_tokens` either way: positions there, tokens here. A document that is
longer has a micro-batch to itself. End to end, no more packs are made than best-fit decreasing
finds (Johnson 1973: at most 11/9 of the fewest possible, and one): the longest document first, each
into the fullest pack that has room for it. Where neighbours in length fit into as few packs, they
share them: attention works on documents of a pack together, for as long as the longest of them
takes.

With weights an epoch has as many documents as there are, each source the share of them that its
weight asks for (in whole documents, by the largest remainder). Each source is gone through in
permutations of its own, one after the other, over the epochs: none of its documents is seen twice
before all of them have been seen once, and one of which an epoch takes a part goes on in the next.

With a curriculum an epoch goes from easy to difficult documents, in random order among equals.
`beginner` and `easy` are 1, `intermediate` and `medium` 2, `advanced` and `hard` 3, `expert` 4; a
number is itself, on any scale as long as all rows use it. A document whose row says nothing, or
another word, is as difficult as the median of the others: first or last it would be trained apart
from what it resembles.

Shape legend: T tokens of a batch, D documents of a batch or a data set, N rows or documents of an
epoch, S documents of a source, K trained positions of a document, M targets of a position.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from vox_core.contract import Batch, Floats, Ints, OrderSpec, Packing, Place, World, padded_groups
from vox_core.data.dataset import Dataset
from vox_core.data.encode import Document

if TYPE_CHECKING:
    from numpy.typing import NDArray


@lru_cache(maxsize=2)  # steps ask for the same epoch over and over
def epoch_order(rows: int, seed: int, epoch: int) -> Ints:
    """The permutation of `rows` in an epoch (from 0); int64 (N,). `seed` is in [0, 2**64)."""
    return _permutation(rows, seed, epoch, 0)


def _permutation(rows: int, seed: int, number: int, stream: int) -> Ints:
    """Streams of one seed and number have nothing in common."""
    key, counter = np.array([seed, number], np.uint64), np.array([0, 0, 0, stream], np.uint64)
    raw_N = np.random.Philox(key=key, counter=counter).random_raw(rows)
    return np.argsort(raw_N, kind="stable").astype(np.int64)


@dataclass(frozen=True, eq=False)
class Ordering:
    """An order that is not the plain one.

    Args:
        weights: of sources, none is 0; empty without.
        sources_D: int32, the source of each document; with weights.
        levels_D: float32, how difficult each document is; with a curriculum.
    """

    documents: int
    weights: tuple[float, ...] = ()
    sources_D: NDArray[np.int32] | None = None
    levels_D: NDArray[np.float32] | None = None

    def spec(self) -> OrderSpec:
        """Return the order as the contract records it."""
        sha256 = hashlib.sha256()
        for name, values_D in (("sources", self.sources_D), ("levels", self.levels_D)):
            if values_D is not None:
                sha256.update(f"{name}:{values_D.dtype.str}:".encode() + values_D.tobytes())
        return OrderSpec(
            "none" if self.levels_D is None else "difficulty", self.weights, sha256.hexdigest()
        )

    def counts(self) -> list[int]:
        """Documents that each source gives to an epoch."""
        return apportion(self.documents, self.weights)

    @lru_cache(maxsize=2)  # noqa: B019 (a process has two orders at most)
    def epoch(self, seed: int, epoch: int) -> Ints:
        """The documents of an epoch (from 0), in order; int64 (N,)."""
        drawn_N = epoch_order(self.documents, seed, epoch)
        if self.sources_D is not None:
            parts = []
            for source, count in enumerate(self.counts()):
                of_it_S = np.flatnonzero(self.sources_D == source)
                parts.append(of_it_S[_stretch(len(of_it_S), count, seed, epoch, source)])
            drawn_N = np.concatenate(parts)[drawn_N]
        if self.levels_D is None:
            return drawn_N
        return drawn_N[np.argsort(self.levels_D[drawn_N], kind="stable")]


def _stretch(rows: int, count: int, seed: int, epoch: int, source: int) -> Ints:
    """The next `count` of the endless row of permutations of a source; int64 (count,)."""
    if not count:
        return np.zeros(0, np.int64)
    first = epoch * count
    passes = range(first // rows, (first + count - 1) // rows + 1)
    laid = np.concatenate([_permutation(rows, seed, each, source + 1) for each in passes])
    start = first - passes.start * rows
    return laid[start : start + count]


def apportion(rows: int, weights: Sequence[float]) -> list[int]:
    """`rows` divided among sources in proportion to their weights, which are not all 0.

    The largest remainder method (Hamilton's): each source gets the whole part of its quota, and the
    rows that are left go to the largest fractions, ties to the source that is named first. Weights
    are taken as the fractions that they are, so nothing depends on the order of a sum.
    """
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    quotas = [rows * weight / whole for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for index in by_fraction[: rows - sum(counts)]:
        counts[index] += 1
    return counts


def filled(levels_D: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replace missing difficulties by the median of the others (the lower of two)."""
    known = np.sort(levels_D[~np.isnan(levels_D)])
    median = known[(len(known) - 1) // 2]
    return np.where(np.isnan(levels_D), median, levels_D)


StepBatches: TypeAlias = tuple[tuple[Batch, ...], float, tuple[tuple[Place, ...], ...]]
"""Batches of a step, its total weight, and the groups that an objective compares."""


def steps_for(rows: int, batch_size: int, epochs: float) -> int:
    """Steps in which every document is seen `epochs` times, the last one filled up."""
    return math.ceil(round(epochs * rows / min(batch_size, rows), 9))  # 0.1 * 3 is above 0.3


def epochs_after(rows: int, batch_size: int, step: int) -> float:
    """Epochs finished after `step` (from 1), as a fraction."""
    return step * min(batch_size, rows) / rows


def documents_of_step(
    rows: int, batch_size: int, seed: int, step: int, ordering: Ordering | None = None
) -> Ints:
    """Indices of the documents of `step` (from 1); int64, min(batch_size, rows) of them.

    Args:
        ordering: of the data set; None for permutations of all documents.
    """

    def epoch(number: int) -> Ints:
        return ordering.epoch(seed, number) if ordering else epoch_order(rows, seed, number)

    size = min(batch_size, rows)
    number, offset = divmod((step - 1) * size, rows)
    order = epoch(number)[offset : offset + size]
    if missing := size - len(order):
        order = np.concatenate([order, epoch(number + 1)[:missing]])
    return order


def documents_in_step(dataset: Dataset, batch_size: int, seed: int, step: int) -> Ints:
    """The documents of a step's groups, in the order of the data set."""
    groups_N = documents_of_step(dataset.groups, batch_size, seed, step, dataset.ordering)
    return dataset.documents_of(groups_N)


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


def cut(
    documents: Sequence[Document], micro_batch_tokens: int, packing: Packing = "rows"
) -> tuple[tuple[Batch, ...], float]:
    """A step's documents as micro-batches, and the sum of weights over all of them.

    `micro_batch_tokens` and `packing` change how the documents are grouped, never which they are.
    """
    groups = grouped([len(document) for document in documents], micro_batch_tokens, packing)
    batches = tuple(to_batch([documents[index] for index in group]) for group in groups)
    return batches, math.fsum(float(batch.weights_T.sum(dtype=np.float64)) for batch in batches)


def cut_groups(
    documents: Sequence[Document],
    micro_batch_tokens: int,
    packing: Packing = "rows",
    references: Sequence[Floats] = (),
    targets: Sequence[Ints] = (),
) -> tuple[tuple[Batch, ...], tuple[tuple[Place, ...], ...]]:
    """The documents of some groups as micro-batches, each group within one; and where they are.

    Args:
        references: of each document, the log-probabilities of the reference model, or the teacher.
        targets: of each document, (K, M), instead of its own tokens.
    """
    bounds = [*(n for n, each in enumerate(documents) if each.side == 0), len(documents)]
    members = [range(*pair) for pair in pairwise(bounds)]
    lengths = [[len(documents[n]) for n in group] for group in members]
    padded = packing == "rows"
    sizes = [max(each) * len(each) if padded else sum(each) for each in lengths]
    batches, groups = [], dict[int, tuple[Place, ...]]()
    for number, pack in enumerate(grouped(sizes, micro_batch_tokens, packing)):
        inside = [n for group in pack for n in members[group]]
        batch = to_batch([documents[n] for n in inside])
        if targets:
            batch = _with_targets(batch, np.concatenate([targets[n] for n in inside]))
        extents = batch.documents()
        batches.append(batch)
        for group in pack:
            groups[group] = tuple(
                Place(
                    documents[n].label, number, next(extents), references[n] if references else None
                )
                for n in members[group]
            )
    return tuple(batches), tuple(groups[group] for group in range(len(members)))


def _with_targets(batch: Batch, targets_KM: Ints) -> Batch:
    """Give the trained positions several targets each, of weight 1."""
    trained_T, shape = batch.trained_T, (len(batch.tokens_T), targets_KM.shape[1])
    targets_TM, weights_TM = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    targets_TM[trained_T], weights_TM[trained_T] = targets_KM, 1
    return Batch(batch.tokens_T, targets_TM, weights_TM, batch.starts_D)


def share_of(sizes: Sequence[int], world: World) -> range:
    """The batches that a rank computes: a stretch of them, so that the largest share is smallest.

    Args:
        sizes: tokens of each batch of a step.
    """
    if world.size == 1:
        return range(len(sizes))
    smallest = max(*sizes, -(-sum(sizes) // world.size))
    possible = range(smallest, sum(sizes) + 1)
    most = possible[bisect_left(possible, True, key=lambda m: len(_filled(sizes, m)) <= world.size)]
    bounds = _filled(sizes, most)
    bounds += [len(sizes)] * (world.size + 1 - len(bounds))
    return range(bounds[world.rank], bounds[world.rank + 1])


def _filled(sizes: Sequence[int], most: int) -> list[int]:
    """Return the starts of stretches of at most `most` tokens each, or of one batch."""
    starts, tokens = [0], 0
    for index, size in enumerate(sizes):
        if tokens + size > most:
            starts.append(index)
            tokens = 0
        tokens += size
    return starts


class ValidationBatches(Sequence[Batch]):
    """Batches with every document once, made one at a time: all may not fit into memory."""

    def __init__(
        self, documents: Dataset, micro_batch_tokens: int, packing: Packing = "rows"
    ) -> None:
        self._documents = documents
        self._groups = grouped(documents.lengths_D.tolist(), micro_batch_tokens, packing)

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return tuple(self[n] for n in range(len(self))[index])
        return to_batch([self._documents[n] for n in self._groups[index]])


def _shifted(values_T: NDArray[Any], last_D: Ints) -> NDArray[Any]:
    """Each value at the position before its own; 0 at the last position of a document."""
    shifted_T = np.empty_like(values_T)
    shifted_T[:-1] = values_T[1:]
    shifted_T[last_D] = 0
    return shifted_T


def grouped(
    lengths: Sequence[int], micro_batch_tokens: int, packing: Packing = "rows"
) -> list[list[int]]:
    """The documents of each micro-batch, by index; each stands in one of them, longest first.

    Args:
        lengths: tokens of each document.
    """
    if packing == "rows":
        return padded_groups(lengths, micro_batch_tokens)
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    alike = _neighbours(lengths, longest_first, micro_batch_tokens)
    fewest = -(-sum(min(n, micro_batch_tokens) for n in lengths) // micro_batch_tokens)
    if len(alike) <= fewest:
        return alike
    best = _best_fit(lengths, longest_first, micro_batch_tokens)
    return best if len(best) < len(alike) else alike


def _neighbours(lengths: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Filled one after the other."""
    packs: list[list[int]] = []
    left = 0
    for index in order:
        if packs and lengths[index] <= left:
            packs[-1].append(index)
        else:
            packs.append([index])
            left = room
        left -= lengths[index]
    return packs


def _best_fit(lengths: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Each into the fullest pack that has room for it, of equals the first."""
    packs: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, number of the pack), in order
    for index in order:
        length = lengths[index]
        at = bisect_left(left, (length, 0))
        if at == len(left):
            packs.append([])
            found, pack = room, len(packs) - 1
        else:
            found, pack = left.pop(at)
        packs[pack].append(index)
        if found > length:
            insort(left, (found - length, pack))
    return packs
