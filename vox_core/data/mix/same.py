"""Rows that are the same, byte for byte, over all sources: the first of each is kept.

Rows whose marks differ are not the same. Those with one mark are read again and held against one
another by a digest, so that where there are no duplicates, next to nothing is done.

Shape legend: N rows of all sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vox_core.data.mix.copy import rows_at
from vox_core.data.mix.scan import Pool
from vox_core.data.records import readable

if TYPE_CHECKING:
    from numpy.typing import NDArray


def without_duplicates(pools: Sequence[Pool]) -> list[Pool]:
    """The rows of each pool that no row before them, in it or in an earlier pool, is the same as.

    Raises:
        DataError: D001, a source cannot be read.
    """
    doubtful_N = shared(np.concatenate([pool.marks_N for pool in pools]))
    ends = np.cumsum([len(pool) for pool in pools])[:-1]
    seen: set[bytes] = set()
    return [
        pool.only(_first(pool, doubtful, seen), "duplicate")
        for pool, doubtful in zip(pools, np.split(doubtful_N, ends), strict=True)
    ]


def shared(marks_N: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which marks stand there more than once."""
    order_N = np.argsort(marks_N, kind="stable")
    same = marks_N[order_N[1:]] == marks_N[order_N[:-1]]
    found_N = np.zeros(len(marks_N), bool)
    found_N[order_N[1:][same]] = True
    found_N[order_N[:-1][same]] = True
    return found_N


def _first(pool: Pool, doubtful: NDArray[np.bool_], seen: set[bytes]) -> NDArray[np.bool_]:
    kept = ~doubtful
    at = np.flatnonzero(doubtful)
    places = pool.starts_N[at].tolist(), pool.sizes_N[at].tolist()
    with readable(pool.path), pool.path.open("rb", buffering=0) as file:
        for index, row in zip(at.tolist(), rows_at(file, *places), strict=True):
            digest = hashlib.blake2b(row, digest_size=16).digest()
            kept[index] = digest not in seen
            seen.add(digest)
    return kept
