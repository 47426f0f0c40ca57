"""Causal attention on the CPU by blocks of queries, each with the keys visible to it.

MLX's own computes the whole square on the CPU and masks half of it, again for the gradients. Blocks
skip nearly all masked scores; except for rounding, the result is the same. GPUs have kernels for
it.

Only instances change: each attention module gets a subclass whose `__call__` uses another attention
function.

Shape legend: N rows, A heads, L positions, D features of a head.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

_ATTENTION = "scaled_dot_product_attention"
BLOCK = 256
"""Queries at once. 128 took as long for rows of 1179 positions, the whole half as long again."""


def attend_in_blocks(model: nn.Module) -> None:
    """Replace mlx-lm's attention function in the attention modules of `model`."""
    changed: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in changed:
            changed[kind] = _changed(kind)
        module.__class__ = changed[kind]


def _changed(kind: type[nn.Module]) -> type[nn.Module]:
    own = kind.__call__
    if not isinstance(own, types.FunctionType) or _ATTENTION not in own.__code__.co_names:
        return kind
    names = own.__globals__
    if _ATTENTION not in names:
        return kind
    call = types.FunctionType(
        own.__code__,
        {**names, _ATTENTION: _in_blocks(names[_ATTENTION])},
        own.__name__,
        own.__defaults__,
        own.__closure__,
    )
    call.__kwdefaults__ = own.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": call})


def _in_blocks(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's attention function, with causal self-attention computed in blocks."""

    def attend(
        queries_NALD: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: object = None,
        scale: float = 1.0,
        mask: object = None,
        **more: Any,
    ) -> mx.array:
        length = queries_NALD.shape[2]
        causal = isinstance(mask, str) and mask == "causal"
        if not causal or cache is not None or length != keys.shape[2] or length <= BLOCK:
            return own(queries_NALD, keys, values, cache, scale=scale, mask=mask, **more)
        count = -(-length // BLOCK)
        ends = [length * number // count for number in range(count + 1)]
        parts = [
            # With fewer queries than keys, "causal" takes them for the last ones.
            own(
                queries_NALD[:, :, begin:end],
                keys[:, :, :end],
                values[:, :, :end],
                None,
                scale=scale,
                mask="causal",
                **more,
            )
            for begin, end in itertools.pairwise(ends)
        ]
        return mx.concatenate(parts, axis=2)

    return attend
