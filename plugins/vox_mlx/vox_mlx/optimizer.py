"""AdamW with bias correction on float32 values, and global norm clipping.

MLX's own AdamW leaves bias correction off unless asked, and computes it from float32 powers, which
at step 1 is wrong in the fifth digit; here the two factors are computed in float64 on the host.

Loshchilov & Hutter, arXiv:1711.05101.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx

from vox_core.contract import Floats, LazyMapping, TrainState, Update
from vox_mlx.arrays import float32

Values = dict[str, mx.array]


class AdamW:
    """A learner's values by canonical name, and their optimizer state."""

    def __init__(self, state: TrainState) -> None:
        tensors = state.adapter.tensors()
        self.values: Values = {name: float32(value) for name, value in tensors.items()}
        moments = {name: state.moments.get(name) for name in tensors}
        self._first = {n: _or_zero(m and m[0], self.values[n]) for n, m in moments.items()}
        self._second = {n: _or_zero(m and m[1], self.values[n]) for n, m in moments.items()}
        self._structure, self._updates = state.adapter, state.updates
        self._whole = state.adapter.method == "full"

    def update(self, gradients: Values, norm: float, by: Update) -> None:
        """Clip and step.

        Args:
            gradients: divided by the step's total weight; emptied, so that MLX can reuse them.
            norm: their global norm.
        """
        # As torch clips: the rate is clamped at 1, and 1e-6 keeps it finite.
        factor = min(1.0, by.clip / (norm + 1e-6)) if by.clip else 1.0
        rate = by.lr / (1 - by.beta1**by.number)
        root = math.sqrt(1 - by.beta2**by.number)
        for name in [*gradients]:
            raw = gradients.pop(name)
            gradient = raw * factor if factor < 1 else raw
            first = by.beta1 * self._first[name] + (1 - by.beta1) * gradient
            second = by.beta2 * self._second[name] + (1 - by.beta2) * mx.square(gradient)
            decays = not self._whole or gradient.ndim > 1
            value = self.values[name] * (1 - by.lr * by.weight_decay if decays else 1)
            self.values[name] = value - rate * first / (mx.sqrt(second) / root + by.eps)
            self._first[name], self._second[name] = first, second
        self._updates = by.number
        mx.eval(self.values, self._first, self._second)

    def state(self) -> TrainState:
        """Return values and moments as numpy, copied; with the method `full` on access. No moments
        before the first update."""
        values = LazyMapping(self.values, lambda name: _numpy(self.values[name]))
        moments = LazyMapping(
            self.values if self._updates else (),
            lambda name: (_numpy(self._first[name]), _numpy(self._second[name])),
        )
        if self._whole:
            return TrainState(self._updates, self._structure.with_tensors(values), moments)
        return TrainState(self._updates, self._structure.with_tensors({**values}), {**moments})


def global_norm(gradients: Mapping[str, mx.array]) -> float:
    """Return the norm over all gradients together, before clipping."""
    # Row by row first: MLX's sum of a long row loses digits (see loss.logsumexp).
    norm: float = mx.sqrt(sum(mx.square(g).sum(-1).sum() for g in gradients.values())).item()
    return norm


def _or_zero(moment: Floats | None, like: mx.array) -> mx.array:
    return mx.zeros_like(like) if moment is None else float32(moment)


def _numpy(array: mx.array) -> Floats:
    import numpy as np

    copy: Floats = np.array(array)
    return copy
