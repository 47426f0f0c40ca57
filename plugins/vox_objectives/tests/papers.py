"""Losses of objectives as their papers write them: float64, one loop over documents, no derivative.

`frozen` are the groups whose numbers a paper treats as constants: ratios of CISPO, KTO's z.

Shape legend: K trained positions of a document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from vox_core.contract import Group, Side


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def sequence(side: Side) -> float:
    return math.fsum(side.log_probs_K.tolist())


def reference(side: Side) -> float:
    return math.fsum(side.reference_K.tolist())


def per_token(side: Side) -> float:
    return sequence(side) / len(side.log_probs_K)


def dpo(
    groups: Sequence[Group],
    frozen: Sequence[Group],
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> float:
    losses, e = [], label_smoothing
    for chosen, rejected in groups:
        ratios = [sequence(side) - reference(side) for side in (chosen, rejected)]
        x = beta * (ratios[0] - ratios[1])
        if loss_type == "sigmoid":  # cDPO, equation 3 of Mitchell's note
            losses.append(-(1 - e) * math.log(sigmoid(x)) - e * math.log(sigmoid(-x)))
        elif loss_type == "robust":  # arXiv:2403.00409, equation 12
            clean, flipped = -math.log(sigmoid(x)), -math.log(sigmoid(-x))
            losses.append(((1 - e) * clean - e * flipped) / (1 - 2 * e))
        elif loss_type == "hinge":
            losses.append(max(0.0, 1 - x))
        else:  # arXiv:2310.12036, equation 17, per token
            h = ratios[0] / len(chosen.log_probs_K) - ratios[1] / len(rejected.log_probs_K)
            losses.append((h - 1 / (2 * beta)) ** 2)
    return fmean(losses)


def simpo(
    groups: Sequence[Group],
    frozen: Sequence[Group],
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
) -> float:
    losses, e = [], label_smoothing
    for chosen, rejected in groups:
        x = beta * per_token(chosen) - beta * per_token(rejected) - gamma
        losses.append(-(1 - e) * math.log(sigmoid(x)) - e * math.log(sigmoid(-x)))
    return fmean(losses)


def orpo(groups: Sequence[Group], frozen: Sequence[Group], beta: float = 0.1) -> float:
    odds = []
    for sides in groups:
        p = [math.exp(per_token(side)) for side in sides]
        odds.append(math.log(sigmoid(math.log(p[0] / (1 - p[0]) / (p[1] / (1 - p[1]))))))
    tokens = [log_p for chosen, _ in groups for log_p in chosen.log_probs_K.tolist()]
    return -fmean(tokens) - beta * fmean(odds)


def kto(
    groups: Sequence[Group],
    frozen: Sequence[Group],
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    loss_type: str = "kto",
) -> float:
    found = [side for group in frozen for side in group if side.label == "kl"]
    z = max(0.0, fmean(sequence(side) - reference(side) for side in found)) if found else 0.0
    z = z if loss_type == "kto" else 0.0
    losses = []
    for group in groups:
        for side in group:
            ratio = sequence(side) - reference(side)
            if side.label == "chosen":
                value = desirable_weight * sigmoid(beta * (ratio - z))
                losses.append(desirable_weight - value)
            elif side.label == "rejected":
                value = undesirable_weight * sigmoid(beta * (z - ratio))
                losses.append(undesirable_weight - value)
    return fmean(losses)


@dataclass(frozen=True)
class Settings:
    """Settings of GRPO with its variants; of PPO if rewards are the advantages."""

    beta: float = 0.0
    kl_estimator: str = "k3"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    importance_sampling_level: str = "token"
    max_completion_length: int = 512
    relative: bool = True

    def reward(self, side: Side) -> float:
        if self.kl_estimator == "k3":
            return side.reward
        pairs = zip(side.sampled_K.tolist(), side.reference_K.tolist(), strict=True)
        return side.reward - self.beta * sum(sampled - reference for sampled, reference in pairs)

    def advantage(self, groups: Sequence[Group], group: Group, index: int) -> float:
        rewards = [self.reward(side) for side in group]
        if not self.relative:
            return rewards[index]
        others = [reward for other, reward in enumerate(rewards) if other != index]
        advantage = rewards[index] - fmean(others if self.loss_type == "rloo" else rewards)
        everything = [self.reward(side) for each in groups for side in each]
        scales = {"group": rewards, "batch": everything}
        if self.scale_rewards in scales:
            advantage /= stdev(scales[self.scale_rewards]) + 1e-4
        return advantage

    def ratios(self, side: Side) -> list[float]:
        pairs = zip(side.log_probs_K.tolist(), side.sampled_K.tolist(), strict=True)
        log_ratios = [now - sampled for now, sampled in pairs]
        if self.loss_type == "rloo":
            return [math.exp(math.fsum(log_ratios))] * len(log_ratios)
        if self.importance_sampling_level == "sequence":
            return [math.exp(fmean(log_ratios))] * len(log_ratios)
        return [math.exp(log_ratio) for log_ratio in log_ratios]

    def token(self, log_prob: float, ratio: float, constant: float, advantage: float) -> float:
        if self.loss_type == "cispo":
            return -min(constant, self.epsilon_high or 5.0) * advantage * log_prob
        high = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        bounded = min(max(ratio, 1 - self.epsilon), high)
        return -min(ratio * advantage, bounded * advantage)

    def kl(self, log_prob: float, log_reference: float) -> float:
        q_over_p = math.exp(log_reference - log_prob)
        return q_over_p - math.log(q_over_p) - 1 if self.kl_estimator == "k3" else 0.0


def grpo(groups: Sequence[Group], frozen: Sequence[Group], **options: Any) -> float:
    settings = Settings(**options)
    losses = []  # of each completion's tokens
    for group, constants in zip(groups, frozen, strict=True):
        for index, (side, constant) in enumerate(zip(group, constants, strict=True)):
            advantage = settings.advantage(groups, group, index)
            tokens = zip(
                side.log_probs_K.tolist(),
                settings.ratios(side),
                settings.ratios(constant),
                side.reference_K.tolist(),
                strict=True,
            )
            losses.append(
                [
                    settings.token(log_prob, ratio, fixed, advantage)
                    + settings.beta * settings.kl(log_prob, log_reference)
                    for log_prob, ratio, fixed, log_reference in tokens
                ]
            )
    if settings.loss_type in ("grpo", "rloo"):
        return fmean(fmean(each) for each in losses)
    if settings.loss_type == "dr_grpo":
        return sum(map(sum, losses)) / (len(losses) * settings.max_completion_length)
    return fmean(loss for each in losses for loss in each)


def ppo(groups: Sequence[Group], frozen: Sequence[Group], **options: Any) -> float:
    return grpo(groups, frozen, relative=False, **options)


def distill(groups: Sequence[Group], frozen: Sequence[Group], top_k: float = 0) -> float:
    losses = []
    if top_k:
        for (side,) in groups:
            for ours, theirs in zip(side.log_probs_K, side.reference_K, strict=True):
                teacher = [math.exp(each) / sum(map(math.exp, theirs)) for each in theirs]
                terms = zip(teacher, ours, strict=True)
                losses.append(sum(share * (math.log(share) - each) for share, each in terms))
        return fmean(losses)
    for group in groups:
        for side in group:
            for t in range(len(side.log_probs_K)):
                reverse_kl = side.sampled_K[t] - side.reference_K[t]
                losses.append(math.exp(side.log_probs_K[t] - side.sampled_K[t]) * reverse_kl)
    return fmean(losses)
