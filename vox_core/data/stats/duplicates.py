"""Rows that say the same as an earlier one, by 64-bit digests.

Two of a million different rows have the same digest in one of ten million data sets.

Shape legend: R rows, E rows that repeat another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vox_core.data.stats.rows import Counts

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAMED = 5


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Args:
    rows: rows that repeat an earlier one.
    repeated: different rows that are repeated.
    first: the first few of `rows`, each with the row that it repeats.
    """

    rows: int
    repeated: int
    first: tuple[tuple[str, str], ...]


def duplicates(counts: Counts, paths: Sequence[Path]) -> Duplicates:
    """Rows with the roles and words of an earlier one."""
    digests_R: NDArray[np.int64] = np.frombuffer(counts.digests, np.int64)
    if not len(digests_R):
        return Duplicates(0, 0, ())
    order_R = np.argsort(digests_R, kind="stable")
    same_R = np.concatenate([[False], digests_R[order_R[1:]] == digests_R[order_R[:-1]]])
    begins_R = np.maximum.accumulate(np.where(same_R, 0, np.arange(len(order_R))))
    again = np.flatnonzero(same_R)
    first_E = order_R[begins_R[again]]
    rows_E = order_R[again]
    named = np.argsort(rows_E)[:NAMED]
    pairs = ((int(rows_E[at]), int(first_E[at])) for at in named)
    return Duplicates(
        len(rows_E),
        len(np.unique(first_E)),
        tuple((place(counts, paths, a), place(counts, paths, b)) for a, b in pairs),
    )


def place(counts: Counts, paths: Sequence[Path], row: int) -> str:
    """`FILE:LINE` of a row."""
    file = int(np.searchsorted(counts.first, row, side="right")) - 1
    return f"{paths[file]}:{counts.lines[row]}"
