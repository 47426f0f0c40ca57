"""Losses and weights of every objective, against its paper's loss in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plugins.vox_objectives.tests import papers
from plugins.vox_objectives.tests.samples import CASES, groups_of, totals_of, typed, weigh

import vox_objectives.preference as preference
import vox_objectives.rollouts as rollouts
from vox_core.contract import Group, ObjectiveSpec, Side, Weighed
from vox_core.run.weighing import StepWeights, mean_metrics
from vox_objectives import vox_objective

H = 1e-5
"""A central difference in float64 errs by H^2 times the third derivative (here below 10), and by
1e-16 / H from rounding."""

SEEDS = range(2)


def check(case: str) -> None:
    """Compare loss and weights of a case on random groups.

    Raises:
        AssertionError: they differ.
    """
    name, options = CASES[case]
    loss: Callable[..., float] = getattr(papers, name)
    for seed in SEEDS:
        groups = groups_of(case, seed)
        found = weigh(case, groups)
        expected = loss(groups, groups, **typed(name, options))
        assert found.loss == pytest.approx(expected, rel=1e-12, abs=1e-12)
        for g, group in enumerate(groups):
            for s, side in enumerate(group):
                if side.label == "kl":  # constant: it has no gradient
                    assert not found.weights[g][s].any()
                    continue
                for t in np.ndindex(side.log_probs_K.shape):
                    above, below = (
                        loss(moved(groups, g, s, t, h), groups, **typed(name, options))
                        for h in (H, -H)
                    )
                    slope = -(above - below) / (2 * H)
                    # Weights are float32: 6e-8 of their size.
                    assert found.weights[g][s][t] == pytest.approx(slope, rel=1e-6, abs=1e-7)


def moved(
    groups: Sequence[Group], g: int, s: int, t: tuple[int, ...], h: float
) -> list[list[Side]]:
    """Groups with one log-probability moved by h."""
    copied = [list(group) for group in groups]
    log_probs_K = copied[g][s].log_probs_K.copy()
    log_probs_K[t] += h
    copied[g][s] = replace(copied[g][s], log_probs_K=log_probs_K)
    return copied


@pytest.mark.parametrize("case", CASES)
def test_weights_are_minus_the_derivative_of_the_papers_loss(case: str) -> None:
    check(case)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("cispo", "kto")])
def test_weights_are_minus_the_derivative_of_the_objectives_own_loss(case: str) -> None:
    groups = groups_of(case, 2)
    found = weigh(case, groups)
    for g, group in enumerate(groups):
        for s, side in enumerate(group):
            t = tuple(length - 1 for length in side.log_probs_K.shape)
            above, below = (weigh(case, moved(groups, g, s, t, h)).loss for h in (H, -H))
            slope = -(above - below) / (2 * H)
            assert found.weights[g][s][t] == pytest.approx(slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_weights_have_the_documents_shape_in_float32(case: str) -> None:
    groups = groups_of(case, 0)
    found = weigh(case, groups)
    for group, weights in zip(groups, found.weights, strict=True):
        for side, weights_K in zip(group, weights, strict=True):
            assert weights_K.dtype == np.float32
            assert weights_K.shape == side.log_probs_K.shape
    assert all(np.isfinite(value) for value in found.metrics.values())


WHOLE = {"kto", "grpo-batch"}


@pytest.mark.parametrize("case", CASES)
def test_an_objective_of_a_whole_step_says_so(case: str) -> None:
    assert vox_objective(ObjectiveSpec(*CASES[case])).separable == (case not in WHOLE)


@pytest.mark.parametrize("case", [case for case in CASES if case not in WHOLE])
def test_a_step_in_parts_has_the_loss_and_weights_of_the_whole(case: str) -> None:
    groups = groups_of(case, 0)
    whole, totals = weigh(case, groups), totals_of(groups)
    parts = [weigh(case, [group], totals) for group in groups]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-12)
    for weights, part in zip(whole.weights, parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(weights), np.concatenate(part.weights[0]))
    made = [StepWeights(p.loss, p.metrics, counts_of(p), []) for p in parts]
    assert mean_metrics(made) == pytest.approx(whole.metrics)


SCORES: dict[str, Callable[[Side], float]] = {
    "dpo": lambda side: float(np.sum(side.log_probs_K - side.reference_K)),
    "simpo": lambda side: float(np.mean(side.log_probs_K)),
    "orpo": lambda side: float(np.mean(side.log_probs_K)),
}
"""What TRL multiplies with beta: an answer's log-ratio, or its mean log-probability."""


@pytest.mark.parametrize("case", ["dpo", "ipo", "simpo", "simpo-smoothed", "orpo"])
def test_rewards_of_pairs_are_trls(case: str) -> None:
    name, options = CASES[case]
    groups, beta = groups_of(case, 0), float(options.get("beta", 2.0))
    chosen, rejected = (np.array([beta * SCORES[name](pair[n]) for pair in groups]) for n in (0, 1))
    assert weigh(case, groups).metrics == pytest.approx(
        {
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "rewards/margins": (chosen - rejected).mean(),
            "rewards/accuracies": (chosen > rejected).mean(),
        }
    )


def test_rewards_of_kto_are_trls() -> None:
    groups = groups_of("kto", 0)
    found = weigh("kto", groups).metrics
    for label in ("chosen", "rejected"):
        scores = [SCORES["dpo"](side) for group in groups for side in group if side.label == label]
        assert found[f"rewards/{label}"] == pytest.approx(0.2 * np.mean(scores))


@pytest.mark.parametrize("case", ["grpo-kl", "ppo", "distill"])
def test_metrics_of_samples(case: str) -> None:
    groups = groups_of(case, 0)
    found = weigh(case, groups).metrics
    joined = [np.concatenate([side.sampled_K for side in group]) for group in groups]
    before = [np.concatenate([side.reference_K for side in group]) for group in groups]
    lengths = [len(all_K) / len(group) for all_K, group in zip(joined, groups, strict=True)]
    assert found["entropy"] == pytest.approx(-np.mean([all_K.mean() for all_K in joined]))
    assert found["completions/mean_length"] == pytest.approx(np.mean(lengths))
    gaps = [(all_K - of_K).mean() for all_K, of_K in zip(joined, before, strict=True)]
    assert found["kl"] == pytest.approx(np.mean(gaps))
    if case != "distill":
        rewards = [[side.reward for side in group] for group in groups]
        assert found["reward"] == pytest.approx(np.mean([np.mean(each) for each in rewards]))
        assert found["reward_std"] == pytest.approx(np.mean([np.std(each) for each in rewards]))


def counts_of(part: Weighed) -> dict[str, int]:
    return {name: part.counts.get(name, 1) for name in part.metrics}


# --- wrong variants -------------------------------------------------------------------------------

DPO, SimPO, ORPO, KTO = preference.DPO, preference.SimPO, preference.ORPO, preference.KTO
GRPO, Distill, Clipped = rollouts.GRPO, rollouts.Distill, rollouts.ClippedPolicy
off_policy = Distill._off_policy

_score, _simpo_score, _orpo_score = DPO.score, SimPO.score, ORPO.score
_loss, _share, _surrogate, _kl = DPO.loss, GRPO.share, GRPO.surrogate, KTO._kl
_clipped = Clipped.surrogate
_log_ratio, _total, _logistic = preference._log_ratio, preference._total, preference._logistic


def _flipped(self: Any, side: Side) -> tuple[float, float]:
    score, slope = _score(self, side)
    return score, -slope


def _one_sided(self: Any, side: Side, advantage: float) -> Any:
    """Clip only ratios above 1, whatever the advantage."""
    ratio_K = np.exp(self.log_ratio(side))
    gain_K = np.minimum(ratio_K, 1.2) * advantage
    return -gain_K, np.where(ratio_K > 1.2, 0.0, gain_K), ratio_K > 1.2


def _unclipped(self: Any, side: Side, advantage: float) -> Any:
    gain_K = np.exp(self.log_ratio(side)) * advantage
    return -gain_K, gain_K, gain_K > np.inf


def _still_trained(self: Any, side: Side, advantage: float) -> Any:
    """The right loss, with the gradient of the unclipped one."""
    values_K, _, clipped_K = _clipped(self, side, advantage)
    return values_K, np.exp(self.log_ratio(side)) * advantage, clipped_K


def _of_population(self: Any, rewards: Any) -> Any:
    return [(group - group.mean()) / (np.std(group) + 1e-4) for group in rewards]


def _over_batch(self: Any, rewards: Any) -> Any:
    mean = np.concatenate(rewards).mean()
    return [(group - mean) / (np.std(group, ddof=1) + 1e-4) for group in rewards]


def _own_in_baseline(self: Any, rewards: Any) -> Any:
    return [group - group.mean() for group in rewards]


def _cispo_once(self: Any, side: Side, advantage: float) -> Any:
    values_K, weights_K, clipped_K = _surrogate(self, side, advantage)
    return values_K, np.full_like(weights_K, advantage), clipped_K


def _slope_of_one_token(self: Any, side: Side, advantage: float) -> Any:
    values_K, weights_K, clipped_K = _surrogate(self, side, advantage)
    return values_K, weights_K / len(weights_K), clipped_K


def _arithmetic(self: Any, side: Side) -> Any:
    ratio_K = np.exp(Clipped.log_ratio(self, side))
    return np.full_like(ratio_K, np.log(ratio_K.mean()))


def _by_own_length(self: Any, side: Side, totals: Any) -> float:
    return 1 / (totals.documents["rollout"] * len(side.log_probs_K))


def _by_tokens(self: Any, side: Side, totals: Any) -> float:
    return 1 / totals.tokens["rollout"]


def _against_now(side: Side) -> Any:
    return side.log_probs_K - side.reference_K


def _teacher_backwards(side: Side) -> Any:
    return side.reference_K - side.sampled_K


def _mean_of(self: Any, side: Side) -> tuple[float, float]:
    score, slope = _score(self, side)
    return score / len(side.log_probs_K), slope / len(side.log_probs_K)


def _sum_of(self: Any, side: Side) -> tuple[float, float]:
    return _total(side.log_probs_K), 1.0


def _odds_as_probabilities(self: Any, side: Side) -> tuple[float, float]:
    return _simpo_score(self, side)


def _without_beta(self: Any, margin: float) -> tuple[float, float]:
    value, slope = _loss(self, margin)
    return value, slope / self.beta


def _ipo_twice(self: Any, margin: float) -> tuple[float, float]:
    gap = margin - 1 / self.beta
    return gap**2, 2 * gap


def _always_sloped(self: Any, margin: float) -> tuple[float, float]:
    return max(0.0, 1 - self.beta * margin), -self.beta


def _undivided(x: float, right: float, wrong: float) -> tuple[float, float]:
    scale = right + wrong
    return _logistic(x, right / scale / 1.2, wrong / scale / 1.2)


def _unsmoothed(x: float, right: float, wrong: float) -> tuple[float, float]:
    return _logistic(x, 1, 0)


def _matched(self: Any, groups: Any) -> float:
    found = [_log_ratio(side) for group in groups for side in group if side.label != "kl"]
    return max(0.0, float(np.mean(found)))


def _unclamped(self: Any, groups: Any) -> float:
    return float(
        np.mean([_log_ratio(side) for group in groups for side in group if side.label == "kl"])
    )


def _forgotten(side: Side) -> float:
    return _total(side.log_probs_K)


def _now_for_sampled(self: Any, side: Side) -> Any:
    return np.zeros(len(side.log_probs_K))


def _unpenalised(self: Any, side: Side) -> float:
    return side.reward


def _first_alone(self: Any, groups: Sequence[Group], totals: Any) -> Weighed:
    found = off_policy(self, groups, totals)
    for (weights_KM,) in found.weights:
        weights_KM[:, 1:] = 0
    return found


def _unscaled(self: Any, groups: Sequence[Group], totals: Any) -> Weighed:
    found = off_policy(self, groups, totals)
    pairs = zip(found.weights, groups, strict=True)
    scaled = [[each[0] * np.exp(side.reference_K).sum(1)[:, None]] for each, (side,) in pairs]
    return replace(found, weights=scaled)


def _reverse(self: Any, groups: Sequence[Group], totals: Any) -> Weighed:
    swapped = [
        [replace(side, log_probs_K=side.reference_K, reference_K=side.log_probs_K)]
        for (side,) in groups
    ]
    return off_policy(self, swapped, totals)


WRONG: dict[str, tuple[str, Any, str, Any]] = {
    "sign": ("dpo", DPO, "score", _flipped),
    "mean for sum": ("dpo", DPO, "score", _mean_of),
    "reference forgotten": ("dpo", preference, "_log_ratio", _forgotten),
    "beta missing in the slope": ("dpo", DPO, "loss", _without_beta),
    "label smoothing ignored": ("cdpo", preference, "_logistic", _unsmoothed),
    "robust not unbiased": ("robust", preference, "_logistic", _undivided),
    "hinge always sloped": ("hinge", DPO, "loss", _always_sloped),
    "IPO target twice as far": ("ipo", DPO, "loss", _ipo_twice),
    "SimPO without length normalisation": ("simpo", SimPO, "score", _sum_of),
    "ORPO of probabilities, not odds": ("orpo", ORPO, "score", _odds_as_probabilities),
    "ORPO without likelihood": ("orpo", ORPO, "weigh", preference.Paired.weigh),
    "KTO with matched answers": ("kto", KTO, "_kl", _matched),
    "KTO with a negative KL": ("kto", KTO, "_kl", _unclamped),
    "KTO without reference": ("kto", preference, "_log_ratio", _forgotten),
    "clip forgotten": ("grpo", Clipped, "surrogate", _unclipped),
    "clip on the wrong side": ("grpo", Clipped, "surrogate", _one_sided),
    "clipped tokens still trained": ("grpo", Clipped, "surrogate", _still_trained),
    "importance weights forgotten": ("grpo", GRPO, "log_ratio", _now_for_sampled),
    "population deviation": ("grpo", GRPO, "advantages", _of_population),
    "baseline of the batch": ("grpo", GRPO, "advantages", _over_batch),
    "token mean for GRPO": ("grpo", GRPO, "share", _by_tokens),
    "sequence mean for DAPO": ("dapo", GRPO, "share", _by_own_length),
    "Dr. GRPO by its own length": ("dr-grpo", GRPO, "share", _by_own_length),
    "k1 forgotten": ("grpo-k1", Clipped, "_reward", _unpenalised),
    "CISPO without its ratio": ("cispo", GRPO, "surrogate", _cispo_once),
    "GSPO with an arithmetic mean": ("gspo", GRPO, "log_ratio", _arithmetic),
    "RLOO with its own reward": ("rloo", GRPO, "advantages", _own_in_baseline),
    "RLOO with one token's slope": ("rloo", GRPO, "surrogate", _slope_of_one_token),
    "teacher backwards": ("distill", rollouts, "_k1", _teacher_backwards),
    "teacher against the current policy": ("distill", rollouts, "_k1", _against_now),
    "only the teacher's first token": ("distill-top-k", Distill, "_off_policy", _first_alone),
    "the teacher's mass not scaled to 1": ("distill-top-k", Distill, "_off_policy", _unscaled),
    "reverse for forward KL": ("distill-top-k", Distill, "_off_policy", _reverse),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_variant_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, owner, name, replacement = WRONG[wrong]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(AssertionError):
        check(case)
