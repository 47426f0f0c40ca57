"""Objectives from judged answers: DPO, ORPO and SimPO from pairs, KTO from single answers.

A pair's loss is a function of its margin: the score of the chosen answer minus that of the rejected
one. An objective defines the score of an answer and the loss of a margin, each with its derivative.

Losses are means over the pairs, or over the answers of KTO, of a whole step. Setting names and
formulas follow TRL 1.16, except where a docstring says so.

Shape legend: K trained positions of a document.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Self

import numpy as np
from pydantic import AliasChoices, Field, model_validator

from vox_core.contract import Floats, Group, Need, Objective, Side, Totals, Weighed
from vox_objectives.options import options
from vox_objectives.rows import judged, mismatched, pair

MOST_LIKELY = -(2.0**-24)
"""Log of the largest probability below 1 in float32; the odds of 1 are infinite."""


@options
class Paired(Objective):
    """A loss of the margin between the scores of a pair's answers."""

    options_of_examples = ()

    beta: float = Field(0.1, gt=0)

    def examples(self, row: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
        return pair(row)

    @abstractmethod
    def score(self, side: Side) -> tuple[float, float]:
        """Return an answer's score, and its derivative with respect to each log-probability."""

    @abstractmethod
    def loss(self, margin: float) -> tuple[float, float]:
        """Return a pair's loss, and its derivative with respect to the margin."""

    def reward(self, side: Side) -> float:
        """Return the implicit reward of an answer, for the metrics."""
        return self.beta * self.score(side)[0]

    def weigh(self, groups: Sequence[Group], totals: Totals) -> Weighed:
        loss, rewards = 0.0, []
        weights: list[list[Floats]] = []
        for chosen, rejected in groups:
            chosen_score, chosen_slope = self.score(chosen)
            rejected_score, rejected_slope = self.score(rejected)
            value, slope = self.loss(chosen_score - rejected_score)
            loss += value / totals.groups
            share = slope / totals.groups
            weights.append(
                [_all(chosen, -share * chosen_slope), _all(rejected, share * rejected_slope)]
            )
            rewards.append((self.reward(chosen), self.reward(rejected)))
        return Weighed(loss, weights, _pair_metrics(rewards))


@options
class DPO(Paired):
    """Direct preference optimisation (Rafailov et al., arXiv:2305.18290).

    With log-ratios r = log p(y|x) - log p_ref(y|x), m = r_chosen - r_rejected, e = label_smoothing:

        sigmoid  -(1 - e) log s(beta m) - e log s(-beta m)              e > 0: cDPO
        robust   (-(1 - e) log s(beta m) + e log s(-beta m)) / (1 - 2e)      arXiv:2403.00409
        hinge    max(0, 1 - beta m)                                     SLiC, arXiv:2305.10425
        ipo      (m' - 1 / (2 beta))^2, m' from log-ratios per token         arXiv:2310.12036

    TRL 1.16 ignores label_smoothing with `sigmoid`; cDPO is that of TRL's CPO over log-ratios.
    """

    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)

    @model_validator(mode="after")
    def _smooths(self) -> Self:
        if self.label_smoothing and self.loss_type in ("ipo", "hinge"):
            raise ValueError(f"label_smoothing has no meaning with loss_type={self.loss_type}")
        return self

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"reference"})

    def score(self, side: Side) -> tuple[float, float]:
        slope = 1 / len(side.log_probs_K) if self.loss_type == "ipo" else 1.0
        return slope * _log_ratio(side), slope

    def reward(self, side: Side) -> float:
        return self.beta * _log_ratio(side)  # not per token with `ipo`

    def loss(self, margin: float) -> tuple[float, float]:
        x, e = self.beta * margin, self.label_smoothing
        match self.loss_type:
            case "sigmoid":
                value, slope = _logistic(x, 1 - e, e)
            case "robust":
                value, slope = _logistic(x, (1 - e) / (1 - 2 * e), -e / (1 - 2 * e))
            case "hinge":
                value, slope = max(0.0, 1 - x), -float(x < 1)
            case "ipo":
                gap = margin - 1 / (2 * self.beta)
                return gap**2, 2 * gap
        return value, self.beta * slope


@options
class SimPO(Paired):
    """Simple preference optimisation (Meng et al., arXiv:2405.14734): no reference model.

    -(1 - e) log s(beta m - gamma) - e log s(gamma - beta m), with m the difference of the mean
    log-probabilities per token and e = label_smoothing. TRL's name `simpo_gamma` works, too; the
    defaults are the paper's, TRL's are CPO's (beta 0.1, gamma 0.5).
    """

    beta: float = Field(2.0, gt=0)
    gamma: float = Field(1.0, ge=0, validation_alias=AliasChoices("gamma", "simpo_gamma"))
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)

    def score(self, side: Side) -> tuple[float, float]:
        slope = 1 / len(side.log_probs_K)
        return slope * _total(side.log_probs_K), slope

    def loss(self, margin: float) -> tuple[float, float]:
        e = self.label_smoothing
        value, slope = _logistic(self.beta * margin - self.gamma, 1 - e, e)
        return value, self.beta * slope


@options
class ORPO(Paired):
    """Odds ratio preference optimisation (Hong et al., arXiv:2403.07691): no reference model.

    The negative log-likelihood per token of the chosen answers, plus -beta log s(m), with m the
    difference of log odds, log(p / (1 - p)), and log p the mean log-probability per token.

    As in the paper the likelihood is that of the answer; TRL's is that of prompt and answer.
    """

    def score(self, side: Side) -> tuple[float, float]:
        tokens = len(side.log_probs_K)
        log_p = min(_total(side.log_probs_K) / tokens, MOST_LIKELY)
        unlikely = -np.expm1(log_p)
        return float(log_p - np.log(unlikely)), float(1 / (unlikely * tokens))

    def reward(self, side: Side) -> float:
        return self.beta * _total(side.log_probs_K) / len(side.log_probs_K)

    def loss(self, margin: float) -> tuple[float, float]:
        value, slope = _logistic(margin, 1, 0)
        return self.beta * value, self.beta * slope

    def weigh(self, groups: Sequence[Group], totals: Totals) -> Weighed:
        odds, tokens = super().weigh(groups, totals), totals.tokens["chosen"]
        nll = -sum(_total(chosen.log_probs_K) for chosen, _ in groups) / tokens
        weights = [[chosen_K + 1 / tokens, rejected_K] for chosen_K, rejected_K in odds.weights]
        return replace(odds, loss=odds.loss + nll, weights=weights)


@options
class KTO(Objective):
    """Kahneman-Tversky optimisation (Ethayarajh et al., arXiv:2402.01306), from single answers.

    With log-ratios r as in DPO, and z the KL to the reference, a constant for the gradient:

        chosen      desirable_weight   * (1 - s(beta (r - z)))
        rejected    undesirable_weight * (1 - s(beta (z - r)))

    z is at least 0, the mean of r over the step's prompts with answers of other rows, as in TRL.
    With `apo_zero_unpaired` (arXiv:2408.06266) z is 0.
    """

    options_of_examples = ("loss_type",)

    beta: float = Field(0.1, gt=0)
    desirable_weight: float = Field(1.0, ge=0)
    undesirable_weight: float = Field(1.0, ge=0)
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"reference", "mismatched"} if self.loss_type == "kto" else {"reference"})

    @property
    def separable(self) -> bool:
        return self.loss_type != "kto"

    def examples(self, row: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
        return judged(row)

    def mismatched(
        self, row: Mapping[str, object], other: Mapping[str, object]
    ) -> Mapping[str, Mapping[str, object]]:
        return {"kl": mismatched(row, other)}

    def weigh(self, groups: Sequence[Group], totals: Totals) -> Weighed:
        answers = totals.documents.get("chosen", 0) + totals.documents.get("rejected", 0)
        signs = {"chosen": (1, self.desirable_weight), "rejected": (-1, self.undesirable_weight)}
        z, loss = self._kl(groups), 0.0
        weights: list[list[Floats]] = []
        for group in groups:
            weights.append([np.zeros(len(side.log_probs_K), np.float32) for side in group])
            for index, side in enumerate(group):
                if side.label == "kl":
                    continue
                sign, weight = signs[side.label]
                utility = _sigmoid(sign * self.beta * (_log_ratio(side) - z))
                loss += weight * (1 - utility) / answers
                slope = sign * self.beta * utility * (1 - utility)
                weights[-1][index] = _all(side, weight * slope / answers)
        ratios = _log_ratios(groups)
        found = {label: ratios[label] for label in signs if label in ratios}
        metrics = {f"rewards/{label}": self.beta * float(np.mean(r)) for label, r in found.items()}
        counts = {f"rewards/{label}": len(r) for label, r in found.items()}
        return Weighed(loss, weights, {"kl": z, **metrics}, counts)

    def _kl(self, groups: Sequence[Group]) -> float:
        if self.loss_type != "kto":
            return 0.0
        return max(0.0, float(np.mean(_log_ratios(groups)["kl"])))


def _total(values_K: Floats) -> float:
    return float(np.sum(values_K, dtype=np.float64))


def _log_ratio(side: Side) -> float:
    assert side.reference_K is not None
    return _total(side.log_probs_K) - _total(side.reference_K)


def _log_ratios(groups: Sequence[Group]) -> dict[str, list[float]]:
    """Return the log-ratios of the documents of each label."""
    found: dict[str, list[float]] = {}
    for side in itertools.chain.from_iterable(groups):
        found.setdefault(side.label, []).append(_log_ratio(side))
    return found


def _all(side: Side, weight: float) -> Floats:
    """Return the same weight for every position of a document."""
    return np.full(len(side.log_probs_K), weight, np.float32)


def _log_sigmoid(x: float) -> float:
    return -float(np.logaddexp(0, -x))


def _sigmoid(x: float) -> float:
    return float(np.exp(_log_sigmoid(x)))


def _logistic(x: float, right: float, wrong: float) -> tuple[float, float]:
    """Return `-right log s(x) - wrong log s(-x)`, and its derivative with respect to x."""
    value = -right * _log_sigmoid(x) - wrong * _log_sigmoid(-x)
    return value, wrong * _sigmoid(x) - right * _sigmoid(-x)


def _pair_metrics(rewards: Sequence[tuple[float, float]]) -> dict[str, float]:
    chosen, rejected = np.array(rewards).T
    return {
        "rewards/margins": float((chosen - rejected).mean()),
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/accuracies": float((chosen > rejected).mean()),
    }
