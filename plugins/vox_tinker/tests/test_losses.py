"""Each loss against its formula, written in torch with float64 and differentiated by it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vox_tinker.losses import LOSSES, loss_named, weighed

LOW, HIGH = 0.8, 1.2
DATUM = np.arange(500) // 10
INSIDE = np.arange(500) % 10 >= 4
"""50 data; the first tokens of each are outside of the mask."""
Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ratio(log_probs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_probs - sampled)


def ppo(log_probs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    clipped = torch.clamp(ratio(log_probs, sampled), LOW, HIGH)
    return -torch.min(ratio(log_probs, sampled) * advantages, clipped * advantages).sum()


def cispo(log_probs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    clipped = torch.clamp(ratio(log_probs, sampled), LOW, HIGH).detach()
    return -(clipped * log_probs * advantages).sum()


def gspo(log_probs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    fixed, total = log_probs.detach(), torch.zeros((), dtype=torch.float64)
    for number in range(50):
        at = torch.from_numpy(np.equal(DATUM, number))
        mean = (fixed - sampled)[at & torch.tensor(INSIDE)].mean()
        ratios = torch.exp(mean + log_probs[at] - fixed[at])
        clipped = torch.clamp(ratios, LOW, HIGH)
        total = total - torch.min(ratios * advantages[at], clipped * advantages[at]).sum()
    return total


FORMULAS: dict[str, Formula] = {
    "cross_entropy": lambda log_probs, _, weights: -(log_probs * weights).sum(),
    "importance_sampling": lambda log_probs, sampled, advantages: (
        -(ratio(log_probs, sampled) * advantages).sum()
    ),
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "dro": lambda log_probs, sampled, advantages: (
        -(log_probs * advantages - 0.5 * 0.05 * (log_probs - sampled) ** 2).sum()
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(name: str) -> None:
    random = np.random.default_rng(0)
    log_probs = random.normal(-2, 1, 500).astype(np.float32)
    # Half of the ratios are clipped, at both ends; some tokens have no advantage.
    sampled = (log_probs + random.normal(0, 0.3, 500)).astype(np.float32)
    advantages = (random.normal(0, 1, 500) * (random.random(500) < 0.9)).astype(np.float32)
    exact = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    expected = FORMULAS[name](exact, torch.tensor(sampled).double(), torch.tensor(advantages))
    expected.backward()
    loss, options = loss_named(name, {})
    given = {"logprobs": sampled, "advantages": advantages, "weights": advantages, **options}
    given |= {"datum": DATUM, "sequence_ratio_mask": INSIDE}
    found, weights = weighed(loss, log_probs, given)
    assert found == pytest.approx(expected.item(), rel=1e-12)
    assert exact.grad is not None
    # The weights are rounded to float32 once.
    np.testing.assert_allclose(weights, -exact.grad.numpy(), rtol=2e-7, atol=1e-12)


def test_thresholds_by_token_are_those_of_the_options() -> None:
    random = np.random.default_rng(1)
    log_probs = random.normal(-2, 1, 50).astype(np.float32)
    given = {
        "logprobs": (log_probs + random.normal(0, 0.5, 50)).astype(np.float32),
        "advantages": random.normal(0, 1, 50).astype(np.float32),
    }
    loss, options = loss_named("ppo", {"clip_low_threshold": 0.5})
    whole = weighed(loss, log_probs, {**given, **options})
    arrays = {name: np.full(50, value, np.float32) for name, value in options.items()}
    by_token = weighed(loss, log_probs, {**given, **options, **arrays})
    assert by_token[0] == pytest.approx(whole[0], rel=1e-6)
    assert options == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2}
