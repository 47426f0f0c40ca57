"""The statistics of `vox eval` and `vox promote` against scipy and statsmodels.

    python3 -m venv ENV
    ENV/bin/pip install -c constraints.txt scipy statsmodels==0.15.0 numpy
    PYTHONPATH=.:plugins/vox_eval ENV/bin/python benchmarks/eval_statistics.py

Prints the largest difference of each, relative to 1 or the value. Exits with 1 if one is more than
1e-12, or for the bootstrap and sampled permutations, more than four standard errors of their own
noise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
from scipy import optimize, stats
from statsmodels.stats.contingency_tables import mcnemar as sm_mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from vox_eval import statistics as own

EXACT = 1e-12
Pairs = Iterator[tuple[float, float]]
RNG = np.random.default_rng(0)


def wilson() -> Pairs:
    for count in (1, 7, 40, 1000):
        for right in {0, count // 3, count}:
            theirs = proportion_confint(right, count, method="wilson")
            scipys = stats.binomtest(right, count).proportion_ci(method="wilson")
            for found, *expected in zip(own.wilson(right, count), theirs, scipys, strict=True):
                # statsmodels leaves roundoff at 0 and 1.
                yield from ((found, each) for each in expected)


def mcnemar() -> Pairs:
    for a, b in ((0, 0), (1, 0), (3, 12), (40, 17), (900, 700)):
        yield own.mcnemar(a, b), float(sm_mcnemar([[5, a], [b, 5]], exact=True).pvalue)
        yield own.mcnemar(a, b), stats.binomtest(a, a + b).pvalue if a + b else 1.0


def one_sided_mcnemar() -> Pairs:
    for a, b in ((1, 0), (12, 3), (3, 12), (40, 17)):
        values_N = np.array([1.0] * a + [-1.0] * b + [0.0] * 9)
        found = own.above(values_N, np.ones(len(values_N)), 0.0, binary=True)
        yield found, stats.binomtest(a, a + b, alternative="greater").pvalue


def holm() -> Pairs:
    for size in (1, 4, 9):
        p = RNG.uniform(0, 0.2, size)
        yield from zip(own.holm(p.tolist()), multipletests(p, method="holm")[1], strict=True)


def exact_permutation() -> Pairs:
    for size in (2, 9, 12):
        values_N = RNG.normal(0.5, 1, size).round(1)
        for side, greater in (("two-sided", False), ("greater", True)):
            found = stats.permutation_test(
                (values_N, np.zeros(size)), lambda a, b, axis: (a - b).sum(axis),
                permutation_type="samples", n_resamples=np.inf, vectorized=True, alternative=side,
            )  # fmt: skip
            yield own.permutation(values_N, greater=greater), found.pvalue


def tango() -> Pairs:
    """The likelihood under the bound, maximised by scipy instead of by Tango's formula.

    Its maximum is flat: the share is found to about 1e-8, and so is the standardised difference.
    """
    for wins, losses, count, bound in ((3, 8, 60, -0.2), (20, 14, 150, -0.05), (9, 2, 80, 0.02)):
        ties = count - wins - losses

        def unlikely(
            share: float, w: int = wins, x: int = losses, t: int = ties, d: float = bound
        ) -> float:
            return -(w * np.log(share + d) + x * np.log(share) + t * np.log(1 - 2 * share - d))

        ends = max(0, -bound) + 1e-9, (1 - bound) / 2 - 1e-9
        share = optimize.minimize_scalar(
            unlikely, bounds=ends, method="bounded", options={"xatol": 1e-14}
        ).x
        variance = count * (2 * share + bound - bound**2)
        z = (wins - losses - count * bound) / np.sqrt(variance)
        values_N = np.array([1.0] * wins + [-1.0] * losses + [0.0] * ties)
        yield own.above(values_N, np.ones(count), bound, binary=True), stats.norm.sf(z)


def bootstrap() -> Pairs:
    values_N = RNG.exponential(1, 80)
    found = stats.bootstrap((values_N,), np.mean, method="percentile", n_resamples=10_000, rng=RNG)
    return zip(own.bootstrap(values_N, np.ones(80)), found.confidence_interval, strict=True)


def sampled_permutation() -> Pairs:
    values_N = RNG.normal(0.2, 1, 60)
    found = stats.permutation_test(
        (values_N, np.zeros(60)), lambda a, b, axis: (a - b).sum(axis),
        permutation_type="samples", n_resamples=100_000, vectorized=True, rng=RNG,
    )  # fmt: skip
    yield own.permutation(values_N), found.pvalue


# An end of a 95 % bootstrap has a standard error of sqrt(0.025 0.975 / 10,000) / density: 0.006
# here, twice over as both are sampled; a sampled p of 0.1 one of 0.003.
NOISE = {bootstrap: 4 * 0.006 * 2**0.5, sampled_permutation: 4 * 0.003, tango: 1e-6}
CHECKS: tuple[Callable[[], Pairs], ...] = (
    wilson,
    mcnemar,
    one_sided_mcnemar,
    holm,
    exact_permutation,
    tango,
    bootstrap,
    sampled_permutation,
)


def main() -> int:
    wrong = 0
    for check in CHECKS:
        apart = [abs(a - b) / max(1, abs(b)) for a, b in check()]
        limit = NOISE.get(check, EXACT)
        wrong += max(apart) > limit
        print(f"{check.__name__:20} {len(apart):3} values  {max(apart):.1e}  (allowed {limit:.1e})")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
