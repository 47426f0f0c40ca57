"""Gradient checkpointing: a layer saves only its input and recomputes the rest in the backward pass
(Chen et al., arXiv:1604.06174).

MLX differentiates a checkpointed function by its arguments only, so the trained values in the
layer's slots are taken out, passed as arguments and put back.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn

from vox_mlx.inject import Injected, Slots


def recompute_layers(injected: Injected) -> None:
    """Make each layer of the model recompute its activations."""
    for layer in injected.model.layers:
        inside = {id(module) for module in layer.modules()}
        slots = {n: slot for n, slot in injected.slots.items() if id(slot[0]) in inside}
        layer.__class__ = _recomputing(type(layer), slots)


def _recomputing(base: type[nn.Module], slots: Slots) -> type[nn.Module]:
    class Layer(base):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            def compute(values: dict[str, mx.array], *args: Any) -> Any:
                for name, value in values.items():
                    setattr(*slots[name], value)
                return super(Layer, self).__call__(*args, **kwargs)

            values = {name: getattr(*slot) for name, slot in slots.items()}
            return mx.checkpoint(compute)(values, *args)

    return Layer
