"""Intervals, tests and power against scipy, brute force and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from vox_eval import statistics
from vox_eval.statistics import (
    LEVEL,
    bootstrap,
    holm,
    mcnemar,
    mean,
    paired_share,
    permutation,
    visible_share,
    visible_shift,
    wilson,
)

EXACT = 1e-12


@pytest.mark.parametrize("count", [1, 7, 40, 1000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_wilson_is_scipys(count, share):
    successes = round(share * count)
    interval = stats.binomtest(successes, count).proportion_ci(LEVEL, method="wilson")
    assert wilson(successes, count) == pytest.approx(tuple(interval), rel=0, abs=EXACT)


def test_wilson_ends_at_the_bounds_of_a_proportion():
    assert {wilson(0, count)[0] for count in range(1, 99)} == {0}
    assert {wilson(count, count)[1] for count in range(1, 99)} == {1}


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (1, 0), (5, 5), (3, 12), (40, 17), (900, 700)]
)
def test_mcnemar_is_the_binomial_test(first, second):
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar(first, second) == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("size", [2, 9, 12])
def test_permutation_of_few_is_exact(size):
    values = np.random.default_rng(size).normal(0.5, 1, size).round(1)
    found = stats.permutation_test(
        (values, np.zeros(size)),
        lambda a, b, axis: (a - b).sum(axis),
        permutation_type="samples",
        n_resamples=np.inf,
        vectorized=True,
    )
    assert permutation(values) == pytest.approx(found.pvalue, abs=EXACT)


def test_permutation_of_many_is_near_the_t_test():
    values = np.random.default_rng(0).normal(0.15, 1, 200)
    expected = stats.ttest_1samp(values, 0).pvalue
    assert permutation(values) == pytest.approx(expected, abs=0.01)
    assert permutation(values) == permutation(values)


def test_examples_with_equal_scores_decide_nothing():
    values = np.array([0.5, -0.1, 0.3])
    assert permutation(np.concatenate([values, np.zeros(50)])) == permutation(values)
    assert permutation(np.zeros(5)) == 1


def test_bootstrap_is_scipys_up_to_its_noise():
    values = np.random.default_rng(1).exponential(1, 80)
    found = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(2)
    ).confidence_interval
    assert bootstrap(values, np.ones(80)) == pytest.approx(tuple(found), abs=0.02)


def test_bootstrap_of_equal_values_says_nothing():
    for values in ([0.0], [0.0] * 80, [1.0] * 3):
        assert bootstrap(np.array(values), np.ones(len(values))) is None
    assert bootstrap(np.array([0.0] * 79 + [1.0]), np.ones(80)) is not None


def test_bootstrap_of_weighted_examples_is_that_of_a_ratio():
    rng = np.random.default_rng(3)
    weights, values = rng.integers(1, 9, 60).astype(float), rng.normal(size=60)
    found = stats.bootstrap(
        (values, weights),
        lambda v, w, axis: (v * w).sum(axis) / w.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(4),
    ).confidence_interval
    assert mean(values, weights) == pytest.approx(float((values * weights).sum() / weights.sum()))
    assert bootstrap(values, weights) == pytest.approx(tuple(found), abs=0.02)


def test_portions_change_no_result(monkeypatch):
    values = np.random.default_rng(5).normal(size=30)
    whole = bootstrap(values, np.ones(30)), permutation(values)
    monkeypatch.setattr(statistics, "_AT_ONCE", 1000)
    assert (bootstrap(values, np.ones(30)), permutation(values)) == whole


@pytest.mark.parametrize("seed", range(20))
def test_holm_is_the_closed_test_of_bonferroni(seed):
    """A hypothesis falls when every intersection that it is part of does: Marcus, Peritz & Gabriel
    1976."""
    p = np.random.default_rng(seed).uniform(0, 0.4, 4).tolist()
    subsets = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]
    expected = [
        max(min(1, len(s) * min(p[i] for i in s)) for s in subsets if at in s) for at in range(4)
    ]
    assert holm(p) == pytest.approx(expected, rel=EXACT)


# --- simulations: the seeds are fixed, the bounds are the mean plus three standard errors ---------

ROUNDS = 400


def _at_most(share: float) -> float:
    return share + 3 * (share * (1 - share) / ROUNDS) ** 0.5


def test_models_that_do_not_differ_are_called_different_in_5_percent_at_most():
    rng = np.random.default_rng(6)
    binary = [rng.random((2, 60)) < 0.6 for _ in range(ROUNDS)]
    p = [mcnemar(int((a & ~b).sum()), int((b & ~a).sum())) for a, b in binary]
    assert np.mean(np.array(p) <= 0.05) <= _at_most(0.05)
    graded = [rng.normal(size=12) for _ in range(ROUNDS)]
    p = [permutation(each) for each in graded]
    found = np.mean(np.array(p) <= 0.05)
    assert 0.05 - 3 * (0.05 * 0.95 / ROUNDS) ** 0.5 <= found <= _at_most(0.05)
    families = [holm([permutation(rng.normal(size=9)) for _ in range(4)]) for _ in range(ROUNDS)]
    assert np.mean([min(each) <= 0.05 for each in families]) <= _at_most(0.05)


def test_intervals_cover_the_truth(monkeypatch):
    rng = np.random.default_rng(7)
    low, high = 0.95 - 3 * (0.95 * 0.05 / ROUNDS) ** 0.5, 1.0
    inside = [a <= 0.3 <= b for a, b in (wilson(k, 50) for k in rng.binomial(50, 0.3, ROUNDS))]
    assert low <= np.mean(inside) <= high
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    drawn = [bootstrap(rng.exponential(1, 150), np.ones(150)) for _ in range(ROUNDS)]
    # The percentile interval of a skewed mean is a little narrow (Efron & Tibshirani, chapter 13).
    assert low - 0.02 <= np.mean([a <= 1 <= b for a, b in drawn]) <= high


def test_the_interval_of_a_paired_difference_covers_it_and_is_never_a_point():
    rng, low = np.random.default_rng(8), 0.95 - 3 * (0.95 * 0.05 / ROUNDS) ** 0.5
    pairs = rng.multinomial(40, (0.3, 0.1, 0.6), ROUNDS).tolist()
    ends = [paired_share(first, second, 40) for first, second, _ in pairs]
    assert low <= np.mean([a <= 0.2 <= b for a, b in ends]) <= 1
    # By hand: p = q = 1/22, z sqrt(2/22 / 22) = 0.126.
    assert paired_share(0, 0, 20) == pytest.approx((-0.12599, 0.12599), abs=1e-5)
    assert paired_share(3, 0, 3)[1] == 1


@pytest.mark.parametrize(("count", "discordant"), [(40, 0.5), (200, 0.5), (200, 0.2)])
def test_the_visible_share_has_the_power_that_was_said(count, discordant):
    share = visible_share(count, 0.05, discordant)
    rng, rounds = np.random.default_rng(8), 4000
    ours, theirs = (discordant + share) / 2, (discordant - share) / 2
    counts = rng.multinomial(count, [ours, theirs, 1 - discordant], rounds)
    found = np.mean([mcnemar(int(a), int(b)) <= 0.05 for a, b, _ in counts])
    assert found == pytest.approx(0.8, abs=0.03)


def test_the_visible_shift_has_the_power_that_was_said():
    shift = visible_shift(14, 0.05)
    rng = np.random.default_rng(9)
    found = np.mean([permutation(rng.normal(shift, 1, 14)) <= 0.05 for _ in range(ROUNDS)])
    assert found == pytest.approx(0.8, abs=0.06)


def test_too_few_examples_show_nothing():
    assert (visible_share(5, 0.05), visible_shift(5, 0.05)) == (None, None)  # 2 * 2**-5 > 0.05
    assert visible_share(6, 0.05) is not None
    assert visible_shift(6, 0.05) is not None
