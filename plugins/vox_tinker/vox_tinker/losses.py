"""The loss functions that clients name, as weights of log-probabilities.

A loss L of log-probabilities l_t has the weights `-dL/dl_t`, which is what a backend's `accumulate`
takes. Each is a sum over tokens. Formulas: https://tinker-docs.thinkingmachines.ai/losses; PPO,
arXiv:1707.06347; CISPO, arXiv:2506.13585; DRO, arXiv:2405.19107; GSPO, arXiv:2507.18071.

Shape legend: T tokens of a batch; with several targets per position, T stands for two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vox_tinker.futures import Refused

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.contract import Floats

Exact: TypeAlias = "NDArray[np.float64]"
Inputs: TypeAlias = "Mapping[str, Exact]"
_Compute: TypeAlias = "Callable[[Exact, Inputs], tuple[Exact, Exact]]"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function.

    Args:
        inputs: names of the arrays that each datum must have, beside `target_tokens`.
        options: names in `loss_fn_config`, with their defaults; a datum may have an array of that
            name instead, with a value for each token, for those in `arrays`.
        compute: float64 log-probabilities and inputs -> losses and weights, all (T,); the inputs
            also have `datum`, the number of the datum that a token belongs to.
    """

    inputs: tuple[str, ...]
    compute: _Compute
    options: Mapping[str, float] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()


def _cross_entropy(log_probs_T: Exact, given: Inputs) -> tuple[Exact, Exact]:
    return -log_probs_T * given["weights"], given["weights"]


def _importance_sampling(log_probs_T: Exact, given: Inputs) -> tuple[Exact, Exact]:
    weights_T = np.exp(log_probs_T - given["logprobs"]) * given["advantages"]
    return -weights_T, weights_T


def _ppo(log_probs_T: Exact, given: Inputs) -> tuple[Exact, Exact]:
    return _clipped(np.exp(log_probs_T - given["logprobs"]), given)


def _gspo(log_probs_T: Exact, given: Inputs) -> tuple[Exact, Exact]:
    """GSPO-token: the ratio of a token has the value of its datum's, and a gradient of its own."""
    inside_T, datum_T = given["sequence_ratio_mask"] != 0, given["datum"].astype(np.int64)
    away_T = np.where(inside_T, log_probs_T - given["logprobs"], 0)
    counts_D = np.bincount(datum_T, inside_T)
    means_D = np.bincount(datum_T, away_T) / np.maximum(counts_D, 1)
    return _clipped(np.exp(means_D)[datum_T], given)


def _clipped(ratio_T: Exact, given: Inputs) -> tuple[Exact, Exact]:
    advantages_T = given["advantages"]
    clipped_T = np.clip(ratio_T, given["clip_low_threshold"], given["clip_high_threshold"])
    free_T = ratio_T * advantages_T
    # Where both are equal, nothing was clipped, and the gradient is that of the ratio.
    used_T = free_T <= clipped_T * advantages_T
    return -np.where(used_T, free_T, clipped_T * advantages_T), np.where(used_T, free_T, 0)


def _cispo(log_probs_T: Exact, given: Inputs) -> tuple[Exact, Exact]:
    ratio_T = np.exp(log_probs_T - given["logprobs"])
    clipped_T = np.clip(ratio_T, given["clip_low_threshold"], given["clip_high_threshold"])
    weights_T = clipped_T * given["advantages"]
    return -weights_T * log_probs_T, weights_T


def _dro(log_probs_T: Exact, given: Inputs) -> tuple[Exact, Exact]:
    away_T, beta = log_probs_T - given["logprobs"], given["beta"]
    losses_T = 0.5 * beta * away_T**2 - log_probs_T * given["advantages"]
    return losses_T, given["advantages"] - beta * away_T


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(("weights",), _cross_entropy),
    "importance_sampling": Loss(_SAMPLED, _importance_sampling),
    "ppo": Loss(_SAMPLED, _ppo, _CLIP, tuple(_CLIP)),
    "cispo": Loss(_SAMPLED, _cispo, _CLIP, tuple(_CLIP)),
    "dro": Loss(_SAMPLED, _dro, {"beta": 0.05}),
    "gspo": Loss((*_SAMPLED, "sequence_ratio_mask"), _gspo, _CLIP, tuple(_CLIP)),
}


def loss_named(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """Return a loss, and the values of its options.

    Raises:
        Refused: there is no such loss, or it has no such option.
    """
    if name not in LOSSES:
        raise Refused(
            f"loss_fn={name!r} is not supported; use one of {', '.join(LOSSES)}, or "
            "forward_backward_custom with a loss of your own"
        )
    loss = LOSSES[name]
    if unknown := config.keys() - loss.options.keys():
        there = ", ".join(loss.options) or "no options"
        raise Refused(
            f"loss_fn_config[{min(unknown)!r}] means nothing to {name}, which has {there}"
        )
    chosen = {**loss.options, **config}
    for key, value in chosen.items():
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise Refused(f"loss_fn_config[{key!r}] must be a finite number, not {value!r}")
    return loss, {key: float(value) for key, value in chosen.items()}


def weighed(loss: Loss, log_probs_T: Floats, given: Mapping[str, Any]) -> tuple[float, Floats]:
    """Return the loss of a batch, and its weights, float32, of the shape of `log_probs_T`."""
    exact = {name: np.asarray(value, np.float64) for name, value in given.items()}
    with np.errstate(over="ignore"):  # an infinite weight ends the step, by its gradient norm
        losses_T, weights_T = loss.compute(log_probs_T.astype(np.float64), exact)
        return float(losses_T.sum()), weights_T.astype(np.float32)
