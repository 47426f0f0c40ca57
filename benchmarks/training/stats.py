"""Rates, ratios and their spread. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the smallest and the largest value."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def rate(amounts: Sequence[float], marks: Sequence[float]) -> float:
    """Amount per second over all steps but the first.

    Args:
        amounts: of each step, from the first.
        marks: when each step was done, in seconds. The first step begins with loading and ends with
            what is made once, so counting starts at its end.
    """
    if len(amounts) != len(marks) or len(marks) < 2:
        raise ValueError(f"{len(amounts)} amounts and {len(marks)} marks; two of each are needed")
    return sum(amounts[1:]) / (marks[-1] - marks[0])


def ratios(mine: Sequence[float], other: Sequence[float]) -> Spread:
    """Mine over the other's, round by round: what slows a round slows both."""
    return spread([a / b for a, b in zip(mine, other, strict=True)])
