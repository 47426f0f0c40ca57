"""Data of the tests, and the requests that the SDK would not send by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8)


def datum(tokens: Sequence[int], weights: Sequence[float] | None = None) -> types.Datum:
    """Shifted tokens, each target with its weight."""
    given = [1.0] * (len(tokens) - 1) if weights is None else list(weights)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": given},
    )


DATA = [datum([10, 20, 30, 40, 50]), datum([7, 8, 9, 8, 7, 8], [0.0, 0.0, 1.0, 1.0, 0.5])]


def sampled(seed: int, count: int, *, masked: bool = False) -> types.Datum:
    """A datum as reinforcement learning makes it: nothing is learnt of its first half."""
    made = np.random.default_rng(seed)
    mask = (np.arange(count) >= count // 2).astype(np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(made.integers(0, 250, count).tolist()),
        loss_fn_inputs={
            "target_tokens": made.integers(0, 250, count),
            "logprobs": (made.normal(-3, 1, count) * mask).astype(np.float32),
            "advantages": (made.normal(0, 1, count) * mask).astype(np.float32),
            **({"sequence_ratio_mask": mask} if masked else {}),
        },
    )
