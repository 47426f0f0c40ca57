"""How many rows each source gives: shares in whole rows, none more than half a row beside the mark.

The largest remainder method (Hamilton's): each source gets the whole part of its quota, and the
rows that are left go to the largest fractions, ties to the source that is named first. Weights are
taken as the fractions that they are, so nothing depends on the order of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


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
