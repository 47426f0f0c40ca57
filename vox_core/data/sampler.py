"""Which documents an epoch has, and in which order: permutations, weights of sources, difficulty.

With weights an epoch has as many documents as there are, each source the share of them that its
weight asks for (in whole documents, by the largest remainder). Each source is gone through in
permutations of its own, one after the other, over the epochs: none of its documents is seen twice
before all of them have been seen once, and one of which an epoch takes a part goes on in the next.

With a curriculum an epoch goes from easy to difficult documents, in random order among equals.
`beginner` and `easy` are 1, `intermediate` and `medium` 2, `advanced` and `hard` 3, `expert` 4; a
number is itself, on any scale as long as all rows use it. A document whose row says nothing, or
another word, is as difficult as the median of the others: first or last it would be trained apart
from what it resembles.

The documents of an epoch are a function of these arrays, the seed and the epoch.

Shape legend: D documents, N documents of an epoch, S documents of a source.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from vox_core.contract import OrderSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.contract import Ints


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
        documents: how many there are.
        weights: of sources, none is 0; empty without.
        sources_D: int32, the source of each document; with weights.
        levels_D: float32, how difficult each document is; with a curriculum.
    """

    documents: int
    weights: tuple[float, ...] = ()
    sources_D: NDArray[np.int32] | None = None
    levels_D: NDArray[np.float32] | None = None

    def spec(self) -> OrderSpec:
        """What of it the contract says."""
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


LEVELS = {
    "beginner": 1.0,
    "easy": 1.0,
    "intermediate": 2.0,
    "medium": 2.0,
    "advanced": 3.0,
    "hard": 3.0,
    "expert": 4.0,
}
UNKNOWN = math.nan


def level(said: float | str | None) -> float:
    """The number; `UNKNOWN` for what says nothing."""
    if said is None:
        return UNKNOWN
    if isinstance(said, str):
        if (named := LEVELS.get(said.strip().lower())) is not None:
            return named
        try:
            said = float(said)
        except ValueError:
            return UNKNOWN
    return float(np.float32(said)) if math.isfinite(said) and abs(said) < 1e30 else UNKNOWN


def filled(levels_D: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replace missing difficulties by the median of the others (the lower of two)."""
    known = np.sort(levels_D[~np.isnan(levels_D)])
    median = known[(len(known) - 1) // 2]
    return np.where(np.isnan(levels_D), median, levels_D)
