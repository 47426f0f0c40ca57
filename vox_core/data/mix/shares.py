"""How many rows each source gives: shares in whole rows, none more than half a row beside the mark.

The largest remainder method (Hamilton's): each source gets the whole part of its quota, and the
rows that are left go to the largest fractions, ties to the source that is named first. Weights are
taken as the fractions that they are, so nothing depends on the order of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

_TRIED = 5_000
"""Numbers of rows: some tenths of a second."""


def apportion(rows: int, weights: Sequence[float]) -> list[int]:
    """`rows` divided among sources in proportion to their weights, which are not all 0."""
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    quotas = [rows * weight / whole for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for index in by_fraction[: rows - sum(counts)]:
        counts[index] += 1
    return counts


def most_rows(weights: Sequence[float], limits: Sequence[int | None]) -> int | None:
    """So many rows that no source is asked for more than its limit (None: it has none).

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
