"""Adapters beside linear layers, their gradients, AdamW and the merge.

Tensors have the names of `AdapterState.tensors()`, so whole trained tensors (`modules_to_save`) are
among them under the names of the parameters that they replace.

Shape legend: T tokens, I input and O output features, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from vox_core.adapter.initial import generator
from vox_core.contract import AdapterState, MergeJob, MergeTarget, TrainState, Update
from vox_core.weights import STORED_AS, numpy_dtype
from vox_numpy.functions import Array, DType, Step, dora, low_rank

Seed: TypeAlias = tuple[int, ...] | None
"""Of the dropout; None: nothing is dropped."""


class Adapter:
    """An adapter that may learn: AdamW (Loshchilov & Hutter, arXiv:1711.05101).

    Attributes:
        values: of its tensors.
        gradients: what passes have added so far; a tensor without any has 0.
    """

    def __init__(self, start: TrainState, dtype: DType, dropout: float = 0.0) -> None:
        self._start, self._dropout, self._updates = start.adapter, dropout, start.updates
        self.values = {name: v.astype(dtype) for name, v in start.adapter.tensors().items()}
        self._moments = {name: np.array(pair, dtype) for name, pair in start.moments.items()}
        self.gradients: dict[str, Array] = {}

    def trains(self, name: str) -> bool:
        return name in self.values

    def add(self, name: str, gradient: Array) -> None:
        """Add to the gradient of a tensor, if it is the adapter's."""
        if self.trains(name):
            self.gradients[name] = self.gradients.get(name, 0) + gradient

    def update(self, path: str, W_OI: Array, x_TI: Array, seed: Seed) -> Step:
        """Return what the adapter adds to the output of a linear layer, (T, O); 0 for a layer that
        it does not change. The backward adds gradients, and returns the one by `x_TI`."""
        if path not in self._start.modules:
            nothing = np.zeros(1, x_TI.dtype)
            return nothing, lambda _: nothing
        kept_TI, scale = self._kept(path, x_TI, seed), self._start.scale(path)
        names = [f"{path}.lora_A.weight", f"{path}.lora_B.weight", f"{path}.lora_magnitude_vector"]
        A_RI, B_OR, *magnitude_O = (self.values[name] for name in names if name in self.values)
        if not magnitude_O:
            y_TO, inner_backward = low_rank(kept_TI * x_TI, A_RI, B_OR, scale)
        else:
            y_TO, inner_backward = dora(kept_TI * x_TI, W_OI, A_RI, B_OR, magnitude_O[0], scale)

        def backward(dy_TO: Array) -> Array:
            dx_TI, *gradients = inner_backward(dy_TO)
            for name, gradient in zip(names, gradients, strict=False):
                self.add(name, gradient)
            return kept_TI * dx_TI

        return y_TO, backward

    def _kept(self, path: str, x_TI: Array, seed: Seed) -> Array:
        """Return 1 / (1 - dropout) where an input is kept, and 0 where it is dropped."""
        if seed is None or not self._dropout:
            return np.ones(1, x_TI.dtype)
        drawn_TI = generator("dropout", *seed, path).random(x_TI.shape)
        return ((drawn_TI >= self._dropout) / (1 - self._dropout)).astype(x_TI.dtype)

    def step(self, update: Update) -> float:
        """Divide, clip and apply the gradients, and forget them.

        Return the norm before clipping; if it is not finite, nothing changes.
        """
        gradients = {name: g / update.total_weight for name, g in self.gradients.items()}
        self.gradients = {}
        squares = (float(np.square(g, dtype=np.float64).sum()) for g in gradients.values())
        norm = math.sqrt(sum(squares))
        if math.isfinite(norm):
            factor = update.clip / (norm + 1e-6) if 0 < update.clip < norm else 1.0  # as torch has
            for name, value in self.values.items():
                gradient = factor * gradients.get(name, np.zeros_like(value))
                self.values[name] = self._stepped(name, value, gradient, update)
            self._updates += 1
        return norm

    def _stepped(self, name: str, value: Array, gradient: Array, update: Update) -> Array:
        first, second = self._moments.get(name, np.zeros((2, *value.shape), value.dtype))
        first = update.beta1 * first + (1 - update.beta1) * gradient
        second = update.beta2 * second + (1 - update.beta2) * gradient**2
        self._moments[name] = np.stack([first, second])
        mean = first / (1 - update.beta1**update.number)
        deviation = np.sqrt(second / (1 - update.beta2**update.number))
        step = mean / (deviation + update.eps) + update.weight_decay * value
        return np.asarray(value - update.lr * step)

    def state(self) -> TrainState:
        """Return float32 copies of values and moments."""
        values = {name: value.astype(np.float32) for name, value in self.values.items()}
        float32 = {name: pair.astype(np.float32) for name, pair in self._moments.items()}
        moments = {name: (first, second) for name, (first, second) in float32.items()}
        return TrainState(self._updates, self._start.with_tensors(values), moments)


def merged(job: MergeJob) -> Iterator[tuple[str, Array]]:
    """Yield each target of a merge, computed in float32 and rounded once."""
    for target in job.targets:
        stored = job.read(target.shape.tensor)
        dtype = numpy_dtype(STORED_AS[job.dtype]) if job.dtype else stored.dtype
        yield target.shape.tensor, _merged(stored, job.adapter, target).astype(dtype)


def _merged(stored: Array, adapter: AdapterState, target: MergeTarget) -> Array:
    """`W + scale * B A`; with DoRA its rows are scaled to the magnitudes."""
    if target.path in adapter.saved:
        return adapter.saved[target.path]
    module, scale = adapter.modules[target.path], np.float32(adapter.scale(target.path))
    W_OI = (stored.T if target.shape.transposed else stored).astype(np.float32)
    W_OI += scale * (module.B_OR @ module.A_RI)
    if module.magnitude_O is not None:
        W_OI *= (module.magnitude_O / np.linalg.norm(W_OI, axis=1))[:, None]
    return W_OI.T if target.shape.transposed else W_OI
