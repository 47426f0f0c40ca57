"""Objectives from sampled completions: GRPO and its variants, PPO, on-policy distillation.

Each is a policy gradient over tokens, `-ratio * advantage`, where `ratio` is the probability now
over that at sampling. An objective defines the advantages, and the share of a token in the step's
loss. Setting names and formulas follow TRL 1.16, except where a docstring says so.

Shape legend: K tokens of a completion, M targets of a token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from vox_core.contract import Floats, Group, Need, Objective, Side, Totals, Weighed
from vox_objectives.options import options

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Doubles: TypeAlias = NDArray[np.float64]
    Bools: TypeAlias = NDArray[np.bool_]

ROLLOUT, ANSWER = "rollout", "answer"
SMALLEST_SCALE = 1e-4
"""Added to the standard deviation of rewards, as in TRL."""


@options
class ClippedPolicy(Objective):
    """A clipped policy gradient, with a penalty on the KL divergence from the reference.

    With d = log p_ref - log p (Schulman, "Approximating KL divergence"): `k3` adds to the loss
    beta (exp(d) - d - 1); `k1` adds to a completion's reward beta d at sampling, as TRL's RLOO
    does, since as a term of the loss its expected gradient is 0.
    """

    beta: float = Field(0.0, ge=0)
    kl_estimator: Literal["k3", "k1"] = "k3"
    epsilon: float = Field(0.2, gt=0)
    epsilon_high: float | None = Field(None, gt=0)

    @property
    def needs(self) -> frozenset[Need]:
        needs: set[Need] = {"rollouts", "rewards"}
        return frozenset(needs | {"reference"} if self.beta else needs)

    @abstractmethod
    def advantages(self, rewards: Sequence[Doubles]) -> Sequence[Doubles]:
        """Return the advantage of each completion, group by group."""

    def log_ratio(self, side: Side) -> Doubles:
        """Return the logarithm of each token's importance ratio."""
        return _doubles(side.log_probs_K) - _doubles(side.sampled_K)

    def share(self, side: Side, totals: Totals) -> float:
        """Return the share of each token in the step's loss."""
        return 1 / totals.tokens[ROLLOUT]

    def surrogate(self, side: Side, advantage: float) -> tuple[Doubles, Doubles, Bools]:
        """Return each token's loss, minus its derivative, and whether the token was clipped."""
        ratio_K = np.exp(self.log_ratio(side))
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        gain_K = ratio_K * advantage
        bound_K = np.clip(ratio_K, 1 - self.epsilon, 1 + high) * advantage
        clipped_K = gain_K > bound_K
        return -np.minimum(gain_K, bound_K), np.where(clipped_K, 0.0, gain_K), clipped_K

    def weigh(self, groups: Sequence[Group], totals: Totals) -> Weighed:
        loss, metrics = 0.0, []
        weights: list[list[Floats]] = []
        rewards = [np.array([self._reward(side) for side in group]) for group in groups]
        for group, advantages in zip(groups, self.advantages(rewards), strict=True):
            weights.append([])
            clipped = []
            for side, advantage in zip(group, advantages.tolist(), strict=True):
                values_K, weights_K, clipped_K = self.surrogate(side, advantage)
                if self.beta and self.kl_estimator == "k3":
                    kl_K, slope_K = _k3(side)
                    values_K, weights_K = (
                        values_K + self.beta * kl_K,
                        weights_K - self.beta * slope_K,
                    )
                share = self.share(side, totals)
                loss += share * float(values_K.sum())
                weights[-1].append((share * weights_K).astype(np.float32))
                clipped.append(clipped_K)
            metrics.append(_metrics(group) | {"clip_ratio": float(np.concatenate(clipped).mean())})
        return Weighed(loss, weights, _means(metrics))

    def _reward(self, side: Side) -> float:
        penalised = self.beta and self.kl_estimator == "k1"
        return side.reward - self.beta * float(_k1(side).sum()) if penalised else side.reward


@options
class PPO(ClippedPolicy):
    """Proximal policy optimisation (Schulman et al., arXiv:1707.06347), the clipped objective.

    A completion's reward is the advantage of each of its tokens. Without a value model, centre the
    rewards yourself, or use GRPO. The loss is the mean over the tokens of the step.
    """

    def advantages(self, rewards: Sequence[Doubles]) -> Sequence[Doubles]:
        return rewards


@options
class GRPO(ClippedPolicy):
    """Group relative policy optimisation (Shao et al., arXiv:2402.03300): the advantage is a reward
    against those of the same prompt, (r - mean) / (std + 1e-4). `loss_type` is a mean over

        dapo     the tokens of the step (arXiv:2503.14476); bnpo is the same, as a step is whole
        grpo     the tokens of each completion, then over completions
        dr_grpo  max_completion_length tokens for each completion (arXiv:2503.20783)
        cispo    the tokens of the step, of -min(ratio, epsilon_high) * advantage * log p with a
                 constant ratio (arXiv:2506.13585); epsilon_high is 5 if left out
        rloo     completions, with the ratio of the whole; the mean is that of the other
                 completions of the prompt (arXiv:2402.14740)

    Dr. GRPO and RLOO have scale_rewards=none. GSPO (arXiv:2507.18071) is the sequence level: the
    geometric mean of a completion's ratios.
    """

    loss_type: Literal["dapo", "bnpo", "grpo", "dr_grpo", "cispo", "rloo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    max_completion_length: int = Field(512, gt=0)
    min_rollouts: ClassVar[int] = 2

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.loss_type == "cispo" and self.epsilon_high is not None and self.epsilon_high < 1:
            raise ValueError("with loss_type=cispo, epsilon_high is the largest ratio: at least 1")
        return self

    @property
    def separable(self) -> bool:
        return self.scale_rewards != "batch"

    def advantages(self, rewards: Sequence[Doubles]) -> Sequence[Doubles]:
        centred = [group - group.mean() for group in rewards]
        if self.loss_type == "rloo":
            centred = [each * len(each) / (len(each) - 1) for each in centred]
        if self.scale_rewards == "none":
            return centred
        batch = np.concatenate(rewards)
        scales = [batch if self.scale_rewards == "batch" else group for group in rewards]
        return [
            each / (np.std(scale, ddof=1) + SMALLEST_SCALE)
            for each, scale in zip(centred, scales, strict=True)
        ]

    def log_ratio(self, side: Side) -> Doubles:
        log_ratio_K = super().log_ratio(side)
        if self.loss_type == "rloo":
            return np.full_like(log_ratio_K, log_ratio_K.sum())
        if self.importance_sampling_level == "sequence":
            return np.full_like(log_ratio_K, log_ratio_K.mean())
        return log_ratio_K

    def share(self, side: Side, totals: Totals) -> float:
        if self.loss_type in ("dapo", "bnpo", "cispo"):
            return super().share(side, totals)
        fixed = self.loss_type == "dr_grpo"
        tokens = self.max_completion_length if fixed else len(side.log_probs_K)
        return 1 / (totals.documents[ROLLOUT] * tokens)

    def surrogate(self, side: Side, advantage: float) -> tuple[Doubles, Doubles, Bools]:
        if self.loss_type == "cispo":
            ratio_K, high = np.exp(self.log_ratio(side)), self.epsilon_high or 5.0
            gain_K = np.minimum(ratio_K, high) * advantage
            return -gain_K * _doubles(side.log_probs_K), gain_K, ratio_K > high
        values_K, weights_K, clipped_K = super().surrogate(side, advantage)
        # The ratio of RLOO has each token as a factor.
        return values_K, weights_K * (len(weights_K) if self.loss_type == "rloo" else 1), clipped_K


@options
class Distill(Objective):
    """On-policy distillation (Lu, "On-Policy Distillation", Thinking Machines, 2025; Agarwal et
    al., arXiv:2306.13649): the reverse KL divergence from a teacher, on the student's completions.

    The advantage of a token is log p_teacher - log p at sampling, the loss the mean over the tokens
    of the step of -ratio * advantage. The teacher has the student's vocabulary.

    With top_k the student learns off-policy (Hinton et al., arXiv:1503.02531), from the rows' own
    answers: the loss is the mean over their tokens of KL(t || p), where t is the teacher's
    distribution over its top_k most likely tokens, scaled to a sum of 1.
    """

    top_k: int = Field(0, ge=0, le=256)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"teacher"} if self.top_k else {"rollouts", "teacher"})

    def examples(self, row: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
        if "chosen" in row:
            raise ValueError("found a preference pair, expected a row with one answer, or a text")
        return {ANSWER: row}

    def weigh(self, groups: Sequence[Group], totals: Totals) -> Weighed:
        return (self._off_policy if self.top_k else self._on_policy)(groups, totals)

    def _off_policy(self, groups: Sequence[Group], totals: Totals) -> Weighed:
        loss, share, metrics = 0.0, 1 / totals.tokens[ANSWER], []
        weights: list[list[Floats]] = []
        for (side,) in groups:
            teacher_KM = _doubles(side.reference_K)
            mass_K1 = np.exp(teacher_KM).sum(1, keepdims=True)
            share_KM = np.exp(teacher_KM) / mass_K1
            gap_KM = teacher_KM - np.log(mass_K1) - _doubles(side.log_probs_K)
            kl_KM = np.where(share_KM > 0, share_KM * gap_KM, 0)
            loss += share * float(kl_KM.sum())
            weights.append([(share * share_KM).astype(np.float32)])
            metrics.append(
                {"kl": float(kl_KM.sum(1).mean()), "teacher_mass": float(mass_K1.mean())}
            )
        return Weighed(loss, weights, _means(metrics))

    def _on_policy(self, groups: Sequence[Group], totals: Totals) -> Weighed:
        loss, share = 0.0, 1 / totals.tokens[ROLLOUT]
        weights: list[list[Floats]] = []
        for group in groups:
            weights.append([])
            for side in group:
                ratio_K = np.exp(_doubles(side.log_probs_K) - _doubles(side.sampled_K))
                gain_K = -share * ratio_K * _k1(side)
                loss -= float(gain_K.sum())
                weights[-1].append(gain_K.astype(np.float32))
        return Weighed(loss, weights, _means([_of_samples(group) for group in groups]))


def _doubles(values_K: Floats | None) -> Doubles:
    assert values_K is not None
    return values_K.astype(np.float64)


def _k1(side: Side) -> Doubles:
    """Return the log-probabilities of a completion at sampling, less the reference's."""
    return _doubles(side.sampled_K) - _doubles(side.reference_K)


def _k3(side: Side) -> tuple[Doubles, Doubles]:
    """Return the estimate of the KL divergence at each token, and its derivative."""
    d_K = _doubles(side.reference_K) - _doubles(side.log_probs_K)
    return np.expm1(d_K) - d_K, -np.expm1(d_K)


def _metrics(group: Group) -> dict[str, float]:
    """Return the rewards of a group's completions, and `_of_samples`."""
    rewards = [side.reward for side in group]
    found = {"reward": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
    return found | _of_samples(group)


def _of_samples(group: Group) -> dict[str, float]:
    """Return the means over a group's completions, and over their tokens; KL divergence and entropy
    are estimated from the sampled tokens."""
    found = {}
    if all(side.reference_K is not None for side in group):
        found["kl"] = float(np.concatenate([_k1(side) for side in group]).mean())
    sampled = np.concatenate([_doubles(side.sampled_K) for side in group])
    found["completions/mean_length"] = len(sampled) / len(group)
    return found | {"entropy": -float(sampled.mean())}


def _means(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([each[name] for each in metrics])) for name in metrics[0]}
