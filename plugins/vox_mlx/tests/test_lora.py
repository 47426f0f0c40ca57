"""What half precision leaves of an adapter."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from vox_mlx.lora import Active, Adapted, Dropout, Lora

WIDE, TOKENS, RANK = 256, 64, 8


@pytest.mark.parametrize("bias", [False, True])
def test_small_updates_are_not_rounded_away(bias: bool) -> None:
    """Of what is added to a rounded number, a third is left; see vox_torch's test of this name."""
    generator = np.random.default_rng(0)

    def random(*shape: int, size: float = 1.0) -> mx.array:
        return mx.array(size * generator.standard_normal(shape)).astype(mx.bfloat16)

    active = Active()
    active.choose(["adapter"])
    layer = Adapted(nn.Linear(WIDE, WIDE, bias=bias), active)
    lora = layer.adapters["adapter"] = Lora(2.0, Dropout(0.0), 0)
    layer.linear.weight = random(WIDE, WIDE, size=1 / 16)
    if bias:
        layer.linear.bias = random(WIDE)
    lora.lora_A, lora.lora_B = random(RANK, WIDE, size=1 / 16), random(WIDE, RANK, size=2**-13)
    x_XI = random(TOKENS, WIDE)
    found = layer(x_XI)
    assert found.dtype == mx.bfloat16

    parts = (found, x_XI, layer.linear.weight, lora.lora_A, lora.lora_B)
    y, x, W, A, B = (np.array(each.astype(mx.float32), np.float64) for each in parts)
    base = x @ W.T + (np.array(layer.linear.bias.astype(mx.float32)) if bias else 0)
    update = 2 * (x @ A.T) @ B.T
    assert ((y - base) * update).sum() / np.square(update).sum() > 0.9
