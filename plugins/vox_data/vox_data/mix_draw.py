"""Sampling without replacement: how many rows of each source, which ones, and in which order.

Everything is a function of the seed, the number of a source and the number of its rows: stable
sorts of Philox's raw stream, as in the core's sampler. A source's rows are put into an order of
its own, and the first of them are taken: so a smaller number of rows is a part of a larger one, and
nothing is taken twice before everything has been taken once.

Shape legend: N rows of a source, R rows of the mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from vox_core.api.rows import apportion
from vox_core.contract import Ints

_TRIED = 5_000
"""Row counts tried by `largest_rows`: some tenths of a second."""
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


def most_rows(weights: Sequence[float], limits: Sequence[int | None]) -> int | None:
    """The largest mixture in which every source stays within its limit (None: unlimited).

    No quota is above its limit then, so no rounding can be; a few more rows might do as well. None
    if no source has a limit.
    """
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    quotas = [
        int(limit * whole / weight)
        for weight, limit in zip(exact, limits, strict=True)
        if limit is not None and weight
    ]
    return min(quotas, default=None)


def largest_rows(weights: Sequence[float], limits: Sequence[int | None]) -> int | None:
    """The largest number of rows of which no source is given more than its limit.

    Of n sources, one with a quota of its limit and a fraction f gets no row for it only if r
    fractions are as large or larger, where all fractions come to r: so f is at most r / (r + 1),
    and r is less than n. No number of rows beyond that has to be looked at. Rounding is not
    monotonic, so those below are tried one by one; where a weight is so small that they are
    thousands, `most_rows` may have to do.
    """
    least = most_rows(weights, limits)
    if least is None:
        return None
    exact = [Fraction(weight) for weight in weights]
    sources = sum(weight > 0 for weight in exact)
    over = Fraction(sources - 1, sources)
    top = min(
        int((limit + over) * sum(exact) / weight)
        for weight, limit in zip(exact, limits, strict=True)
        if limit is not None and weight
    )
    tried = range(top, max(least, top - _TRIED), -1)
    return next((rows for rows in tried if _fit(rows, weights, limits)), least)


def _fit(rows: int, weights: Sequence[float], limits: Sequence[int | None]) -> bool:
    counts = zip(apportion(rows, weights), limits, strict=True)
    return all(limit is None or count <= limit for count, limit in counts)
