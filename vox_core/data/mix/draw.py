"""Which rows of each source are taken, and in which order all of them stand.

Everything is a function of the seed, the number of a source and the number of its rows: stable
sorts of Philox's raw stream, as in `vox_core.data.order`. A source's rows are put into an order of
its own, and the first of them are taken: so a smaller number of rows is a part of a larger one, and
nothing is taken twice before everything has been taken once.

Shape legend: N rows of a source, R rows of the mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vox_core.contract import Ints

_OF_ALL = 0
"""Key of the order of the whole mixture; sources count from 1."""


def permutation(rows: int, seed: int, key: int) -> Ints:
    """int64 (rows,); `seed` and `key` are in [0, 2**64)."""
    raw_N = np.random.Philox(key=np.array([seed, key], np.uint64)).random_raw(rows)
    return np.argsort(raw_N, kind="stable").astype(np.int64)


def drawn(rows: int, count: int, seed: int, source: int) -> Ints:
    """`count` of `rows` rows, each as often as any other, but for one time.

    Args:
        count: of them; more than `rows` repeats rows.
        source: the source's number, from 0.
    """
    if not count:
        return np.zeros(0, np.int64)
    order_N = permutation(rows, seed, source + 1)
    return np.resize(order_N, count)


def mixed(chosen: Sequence[Ints], seed: int) -> tuple[Ints, Ints]:
    """The rows drawn of each source, shuffled together: (source, row of it), int64 (R,) each."""
    sources_R = np.repeat(np.arange(len(chosen), dtype=np.int64), [len(rows) for rows in chosen])
    rows_R = np.concatenate([np.zeros(0, np.int64), *chosen])
    order_R = permutation(len(rows_R), seed, _OF_ALL)
    return sources_R[order_R], rows_R[order_R]
