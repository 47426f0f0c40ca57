"""Lengths of rows: percentiles, and what a limit cuts away.

Shape legend: R rows, or different lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PERCENTILES = (5, 25, 50, 75, 90, 95, 99)
LIMITS = tuple(512 << n for n in range(12))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of some rows.

    Args:
        percentiles: p -> the length that p % of the rows do not exceed.
    """

    total: int
    mean: float
    longest: int
    percentiles: dict[int, int]


@dataclass(frozen=True, slots=True)
class Truncation:
    """What a limit does: rows that are longer, and the tokens that they have beyond it."""

    seq_len: int
    rows: int
    tokens: int


def lengths(values_R: NDArray[np.int64], rows_R: NDArray[np.int64]) -> Lengths:
    """Args:
    values_R, rows_R: int64; lengths, in rising order, and how many rows have each.
    """
    if not len(values_R):
        return Lengths(0, 0.0, 0, dict.fromkeys(PERCENTILES, 0))
    reached_R = np.cumsum(rows_R)
    rows, total = int(reached_R[-1]), int(values_R @ rows_R)
    ranks = [max(1, -(-rows * p // 100)) for p in PERCENTILES]  # nearest rank
    found = values_R[np.searchsorted(reached_R, ranks)].tolist()
    return Lengths(
        total, total / rows, int(values_R[-1]), dict(zip(PERCENTILES, found, strict=True))
    )


def truncations(
    values_R: NDArray[np.int64], rows_R: NDArray[np.int64], seq_len: int
) -> list[Truncation]:
    """At `seq_len`, and at each power of two from 512 up to where nothing is cut any more."""
    longest = int(values_R.max(initial=0))
    limits = [limit for limit in LIMITS if limit < longest]
    limits += [limit for limit in LIMITS if limit >= longest][:1]
    return [
        Truncation(
            limit,
            int(rows_R[values_R > limit].sum()),
            int((np.maximum(values_R - limit, 0) * rows_R).sum()),
        )
        for limit in sorted({*limits, seq_len})
    ]


def histogram(found: Mapping[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths in rising order, and rows of each."""
    pairs = sorted(found.items())
    return (
        np.array([length for length, _ in pairs], np.int64),
        np.array([rows for _, rows in pairs], np.int64),
    )


def histogram_of(values: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same, of one length a row."""
    values_R, rows_R = np.unique(np.asarray(values, np.int64), return_counts=True)
    return values_R, rows_R.astype(np.int64)
