"""Intervals and tests of scores: one model's mean, and the difference of two on the same examples.

    wilson             interval of a proportion
    paired_share       interval of the difference of two proportions
    bootstrap          percentile interval of a mean
    mcnemar            exact test of two models with scores of 0 and 1
    permutation        exact or sampled test of paired scores of any kind
    holm               p-values of several tasks together
    clustered          examples of the same source -> one value
    above              one-sided test of a mean difference against a bound
    visible_share, visible_shift    the smallest difference that a number of examples shows
    power_of_shares, power_of_means, rows_needed    how often a difference is found, in cycles

Everything but `above` and the power of it is two-sided, and what draws random numbers has a fixed
seed. scipy and statsmodels are the reference of the tests and no dependency.

Shape legend: N examples, K examples whose scores differ, C clusters; D simulated comparisons, Y
cycles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Doubles: TypeAlias = "NDArray[np.float64]"
Interval: TypeAlias = tuple[float, float]

LEVEL = 0.95
"""Coverage of every interval; a test is significant at 1 - LEVEL."""
ONE_SIDED = (1 - LEVEL) / 2
"""Significance of a one-sided test: the half of a two-sided one that it can reject with."""
POWER = 0.8
RESAMPLES = 10_000
SEED = 0
SIMULATED = 10_000
"""Comparisons whose outcomes give a power, to 0.4 points (standard error)."""
MOST_ROWS = 1 << 17
"""Rows that `rows_needed` tries at most."""
MOST_EXACT = 16
"""Differences up to which `permutation` enumerates all sign patterns."""
_AT_ONCE = 1 << 22
"""Random numbers drawn at once."""


def mean(values_N: Doubles, weights_N: Doubles) -> float:
    """Return sum(weights * values) / sum(weights)."""
    return float(weights_N @ values_N) / float(weights_N.sum())


def wilson(successes: int, count: int) -> Interval:
    """Return the score interval of a proportion (Wilson 1927, "Probable inference, the law of
    succession, and statistical inference", JASA 22)."""
    z, share = NormalDist().inv_cdf((1 + LEVEL) / 2), successes / count
    centre = share + z**2 / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    low, high = (centre - half) / scale, (centre + half) / scale
    return (0.0 if successes == 0 else low), (1.0 if successes == count else high)


def bootstrap(values_N: Doubles, weights_N: Doubles) -> Interval | None:
    """Return the percentile interval of a weighted mean (Efron & Tibshirani 1993, "An Introduction
    to the Bootstrap", chapter 13). Of paired differences, it is the paired bootstrap.

    None of equal values, or of one: they say nothing about others; all resamples are the same."""
    products_N, size = weights_N * values_N, len(values_N)
    if values_N.min() == values_N.max():
        return None
    rng, means = np.random.default_rng(SEED), list[Doubles]()
    for count in _portions(size):
        drawn = rng.integers(0, size, (count, size))
        means.append(products_N[drawn].sum(1) / weights_N[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def paired_share(first_only: int, second_only: int, count: int) -> Interval:
    """Return the interval of the difference of two proportions on the same examples (Bonett & Price
    2012, "Adjusted Wald confidence interval for a difference of binomial proportions based on
    paired data", Journal of Educational and Behavioral Statistics 37).

    Args:
        first_only, second_only: as `mcnemar` takes them.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    p, q = (first_only + 1) / (count + 2), (second_only + 1) / (count + 2)
    half = z * math.sqrt((p + q - (p - q) ** 2) / (count + 2))
    return max(-1.0, p - q - half), min(1.0, p - q + half)


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the exact p-value of two models' scores of 0 and 1 on the same examples (McNemar
    1947, Psychometrika 12): the binomial test of the examples that only one has right.

    Args:
        first_only, second_only: examples that only the first, and only the second, has right.
    """
    return min(1.0, 2 * _tail(first_only + second_only, min(first_only, second_only)))


def permutation(differences_N: Doubles, *, greater: bool = False) -> float:
    """Return the p-value of the sum of paired differences, under random signs (Fisher 1935, "The
    Design of Experiments", chapter 3).

    All 2^K patterns up to K = 16; beyond, 10,000 random ones, where the observed pattern counts as
    one of them (Phipson & Smyth 2010, arXiv:1603.05766).

    Args:
        greater: one-sided, against a sum of 0 or less.
    """
    values_K = differences_N[differences_N != 0]

    def size(sums: Doubles) -> Doubles:
        return sums if greater else np.abs(sums)

    # Sums that are equal differ by roundoff; it is far below 1e-12 of their terms.
    limit = float(size(values_K.sum())) - 1e-12 * float(np.abs(values_K).sum())
    if len(values_K) <= MOST_EXACT:
        sums = np.zeros(1)
        for value in values_K:
            sums = np.concatenate([sums + value, sums - value])
        return float((size(sums) >= limit).mean())
    rng, extreme = np.random.default_rng(SEED), 1
    for count in _portions(len(values_K)):
        signs = np.where(rng.random((count, len(values_K))) < 0.5, 1.0, -1.0)
        extreme += int((size(signs @ values_K) >= limit).sum())
    return extreme / (RESAMPLES + 1)


def _portions(size: int) -> list[int]:
    """Split `RESAMPLES` so that each portion of `size` numbers each fits in memory."""
    each = max(1, _AT_ONCE // size)
    return [min(each, RESAMPLES - start) for start in range(0, RESAMPLES, each)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979, "A simple sequentially rejective
    multiple test procedure", Scandinavian Journal of Statistics 6), in the given order."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = highest
    return adjusted


def clustered(
    values_N: Doubles, weights_N: Doubles, sources: Sequence[str | None]
) -> tuple[Doubles, Doubles]:
    """Return values and weights of clusters: the weighted mean of the examples of each source, in
    the order of their first examples. An example without a source is one of its own.

    What resamples clusters or changes their signs allows any dependence within a source (Cameron,
    Gelbach & Miller 2008, "Bootstrap-based improvements for inference with clustered errors", The
    Review of Economics and Statistics 90)."""
    numbers: dict[object, int] = {}
    keys = (("row", at) if source is None else source for at, source in enumerate(sources))
    at_N = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    if len(numbers) == len(values_N):
        return values_N, weights_N
    weights_C = np.bincount(at_N, weights_N).astype(np.float64)
    return np.bincount(at_N, weights_N * values_N) / weights_C, weights_C


def above(differences_N: Doubles, weights_N: Doubles, bound: float, *, binary: bool) -> float:
    """Return the one-sided p-value of a mean paired difference that is no more than `bound`.

    Differences of scores of 0 and 1: half of McNemar's exact test for a bound of 0, else the score
    test (Tango 1998, "Equivalence test and confidence interval for the difference in proportions
    for the paired-sample design", Statistics in Medicine 17). Others: the permutation test, and
    for another bound than 0 also the z-test of `supplemented` differences, the larger p-value:
    signs are random only if differences are symmetric about the bound, which ties beside rare
    losses are not.

    Args:
        binary: differences are -1, 0 and 1, and their weights equal.
    """
    if not binary:
        p = permutation(weights_N * (differences_N - bound), greater=True)
        return max(p, _above_by_z(differences_N, weights_N, bound)) if bound else p
    wins, losses = int((differences_N > 0).sum()), int((differences_N < 0).sum())
    if bound == 0:
        return _tail(wins + losses, losses)
    z = float(_tango(np.array(wins), np.array(losses), len(differences_N), bound))
    return math.erfc(z / math.sqrt(2)) / 2


def supplemented(differences_N: Doubles) -> Doubles:
    """Return differences with two wins and two losses more, each as large as the largest one (1 if
    all are ties), as Agresti & Coull 1998 ("Approximate is better than exact for interval
    estimation of binomial proportions", The American Statistician 52) add them to proportions."""
    largest = float(np.abs(differences_N).max()) or 1.0
    return np.concatenate([differences_N, np.array([1.0, 1.0, -1.0, -1.0]) * largest])


def _above_by_z(differences_N: Doubles, weights_N: Doubles, bound: float) -> float:
    values = supplemented(differences_N)
    weights = np.concatenate([weights_N, np.full(4, weights_N.mean())])
    centre = mean(values, weights)
    error = math.sqrt(float((weights**2) @ (values - centre) ** 2)) / float(weights.sum())
    return math.erfc((centre - bound) / error / math.sqrt(2)) / 2


def _tail(count: int, most: int) -> float:
    """Return the probability of `most` successes or fewer in fair trials."""
    ways, tail = 1, 1
    for k in range(most):
        ways = ways * (count - k) // (k + 1)
        tail += ways
    chance: float = tail / 2**count
    return chance


def _tango(wins: Doubles, losses: Doubles, count: int, bound: float) -> Doubles:
    """Return the standardised difference of two proportions, less `bound` (see `above`)."""
    a = 2 * count
    b = (a - wins + losses) * bound - wins - losses
    c = -losses * bound * (1 - bound)
    share = (np.sqrt(np.maximum(b * b - 4 * a * c, 0)) - b) / (2 * a)
    variance = count * (2 * share + bound * (1 - bound))
    found: Doubles = (wins - losses - count * bound) / np.sqrt(np.maximum(variance, 1e-300))
    return found


# --- power ----------------------------------------------------------------------------------------


def visible_share(count: int, alpha: float, discordant: float = 0.5) -> float | None:
    """Return the smallest difference of two proportions that `mcnemar` finds with a power of 80 %,
    by simulation; None if it finds none.

    Args:
        alpha: level of significance.
        discordant: share of the examples that one model alone has right; 0.5 is that of two
            independent models which have half of them right, and no two independent models of
            equal accuracy have more.
    """

    def enough(difference: float) -> bool:
        return power_of_shares(count, difference, 0.0, 1, discordant, alpha / 2) >= POWER

    if not enough(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def visible_shift(count: int, alpha: float) -> float | None:
    """Return the smallest mean difference of paired scores that a test finds with a power of 80 %,
    in standard deviations of the differences; None if `permutation` cannot find any.
    The sample size of the t-test, solved for the mean (Guenther 1981, "Sample size formulas for
    normal theory t tests", The American Statistician 35)."""
    if 2.0 ** (1 - count) > alpha:
        return None
    z = NormalDist().inv_cdf(1 - alpha / 2)
    return (z + NormalDist().inv_cdf(POWER)) / math.sqrt(count - z**2 / 2)


def power_of_shares(
    rows: int,
    mean: float,
    bound: float,
    cycles: int,
    discordant: float = 0.5,
    alpha: float = ONE_SIDED,
) -> float:
    """Return how often `above` finds a difference of two proportions over all rows, and each of
    equal cycles has one above `bound`, by simulation.

    Args:
        mean: the true difference.
        discordant: share of the rows that one model alone has right.
        alpha: level of significance, one-sided.
    """
    rng, discordant = np.random.default_rng(SEED), max(discordant, abs(mean))
    shares = (discordant + mean) / 2, (discordant - mean) / 2, 1 - discordant
    sizes_Y = np.array([rows // cycles + (at < rows % cycles) for at in range(cycles)])
    counts_YD3 = np.stack([rng.multinomial(size, shares, SIMULATED) for size in sizes_Y])
    gains_YD = counts_YD3[..., 0] - counts_YD3[..., 1]
    found_D = (gains_YD > bound * sizes_Y[:, None]).all(0)
    wins_D, losses_D, _ = counts_YD3.sum(0).T
    if bound:
        z = NormalDist().inv_cdf(1 - alpha)
        found_D &= _tango(wins_D, losses_D, rows, bound) >= z
    else:
        numbers_D = wins_D + losses_D
        limits = {count: _limit(count, alpha) for count in np.unique(numbers_D).tolist()}
        found_D &= losses_D <= [limits[count] for count in numbers_D.tolist()]
    return float(found_D.mean())


def power_of_means(shift: float, cycles: int, rows: int) -> float:
    """Return the same as `power_of_shares` for a mean of any scores.

    Args:
        shift: true difference less the bound, in standard deviations of the rows' differences.
    """
    z = NormalDist().inv_cdf(1 - ONE_SIDED)
    if rows - z**2 / 2 <= 0 or rows < cycles:
        return 0.0
    rng = np.random.default_rng(SEED)
    means_DY = rng.normal(shift, math.sqrt(cycles / rows), (SIMULATED, cycles))
    shown_D = means_DY.mean(1) * math.sqrt(rows - z**2 / 2) >= z  # as in `visible_shift`
    return float((shown_D & (means_DY > 0).all(1)).mean())


def rows_needed(power: Callable[[int], float], least: int) -> int | None:
    """Return how many rows have a power of 80 %, to 1 %; None if that is more than 100,000.

    Args:
        power: of a number of rows.
        least: number of rows to begin with.
    """
    low = high = least
    while power(high) < POWER:
        low, high = high, 2 * high
        if high > MOST_ROWS:
            return None
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


def _limit(count: int, alpha: float) -> int:
    """Return the largest number of losses of `count` discordant examples that `above` finds
    significant; -1 if none is."""
    k = np.arange(count // 2 + 1)
    steps = np.log(count - k[1:] + 1) - np.log(k[1:])
    logs = np.concatenate([[0.0], np.cumsum(steps)]) - count * math.log(2)
    return int((np.exp(logs).cumsum() <= alpha).sum()) - 1
