"""Random groups of each kind of objective, and their totals.

Log-probabilities are float64, so that finite differences are not lost in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from vox_core.contract import Group, ObjectiveSpec, Side, Totals, Weighed
from vox_objectives import vox_objective

CASES: dict[str, tuple[str, dict[str, str]]] = {
    "dpo": ("dpo", {"beta": "0.3"}),
    "cdpo": ("dpo", {"beta": "0.3", "label_smoothing": "0.2"}),
    "robust": ("dpo", {"beta": "0.3", "loss_type": "robust", "label_smoothing": "0.2"}),
    "hinge": ("dpo", {"beta": "0.3", "loss_type": "hinge"}),
    "ipo": ("dpo", {"beta": "0.3", "loss_type": "ipo"}),
    "simpo": ("simpo", {}),
    "simpo-smoothed": ("simpo", {"beta": "1.5", "gamma": "0.4", "label_smoothing": "0.1"}),
    "orpo": ("orpo", {"beta": "0.25"}),
    "kto": ("kto", {"beta": "0.2", "desirable_weight": "1.5", "undesirable_weight": "0.7"}),
    "kto-apo": ("kto", {"beta": "0.2", "loss_type": "apo_zero_unpaired"}),
    "grpo": ("grpo", {"loss_type": "grpo"}),
    "grpo-kl": ("grpo", {"loss_type": "grpo", "beta": "0.3"}),
    "grpo-k1": ("grpo", {"loss_type": "grpo", "beta": "0.3", "kl_estimator": "k1"}),
    "grpo-batch": ("grpo", {"loss_type": "grpo", "scale_rewards": "batch"}),
    "dapo": ("grpo", {"epsilon_high": "0.28"}),
    "bnpo": ("grpo", {"loss_type": "bnpo"}),
    "dr-grpo": (
        "grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": "20"},
    ),
    "cispo": ("grpo", {"loss_type": "cispo", "epsilon_high": "1.1"}),
    "gspo": (
        "grpo",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": "0.03"},
    ),
    "rloo": (
        "grpo",
        {"loss_type": "rloo", "scale_rewards": "none", "beta": "0.05", "kl_estimator": "k1"},
    ),
    "ppo": ("ppo", {"beta": "0.2"}),
    "ppo-k1": ("ppo", {"beta": "0.2", "kl_estimator": "k1", "epsilon_high": "0.3"}),
    "distill": ("distill", {}),
    "distill-top-k": ("distill", {"top_k": "3"}),
}


def typed(name: str, options: dict[str, str]) -> dict[str, object]:
    """Options as the papers' functions take them."""
    words = {"loss_type", "scale_rewards", "importance_sampling_level", "kl_estimator"}
    return {key: value if key in words else float(value) for key, value in options.items()}


def weigh(case: str, groups: Sequence[Group], totals: Totals | None = None) -> Weighed:
    name, options = CASES[case]
    objective = vox_objective(ObjectiveSpec(name, options))
    return objective.weigh(groups, totals or totals_of(groups))


def totals_of(groups: Sequence[Group]) -> Totals:
    documents, tokens = Counter[str](), Counter[str]()
    for group in groups:
        for side in group:
            documents[side.label] += 1
            tokens[side.label] += len(side.log_probs_K)
    return Totals(len(groups), documents, tokens)


def groups_of(case: str, seed: int) -> list[list[Side]]:
    """Groups of a case; odd seeds have a policy far below its reference, so KTO's z is 0."""
    random = np.random.default_rng(seed)
    name, options = CASES[case]
    if count := int(options.get("top_k", 0)):
        return [[_answer(random, count)] for _ in range(4)]
    if name == "kto":
        labels = [["chosen"], ["rejected"], ["chosen", "rejected"], ["chosen"], ["rejected"]]
        labels = [[*each, "kl"] for each in labels]
    elif name in ("grpo", "ppo", "distill"):
        labels = [["rollout"] * size for size in (4, 3, 5)]
    else:
        labels = [["chosen", "rejected"]] * 4
    return [[_side(random, label, seed % 2) for label in group] for group in labels]


def _answer(random: np.random.Generator, count: int) -> Side:
    """A document, and what a teacher finds most likely at each of its positions."""
    shape = int(random.integers(1, 9)), count
    teacher_KM = np.log(random.dirichlet(np.ones(count + 1), shape[0])[:, :count])
    return Side("answer", -random.uniform(0.05, 3, shape), -np.sort(-teacher_KM, axis=1))


def _side(random: np.random.Generator, label: str, below: int) -> Side:
    tokens = int(random.integers(1, 9))
    log_probs_K = -random.uniform(0.05, 3, tokens)
    shift = 0.2 * (1 if below else -1)
    rollout = label == "rollout"
    return Side(
        label,
        log_probs_K,
        log_probs_K + shift + random.normal(0, 0.5, tokens),
        log_probs_K + random.normal(0, 0.15, tokens) if rollout else None,
        float(random.normal(0, 1)) if rollout else 0.0,
    )
