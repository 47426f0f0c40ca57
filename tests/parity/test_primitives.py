"""The products that everything else is made of, torch against MLX against float64.

A disagreement of two backends shows here first, and by itself.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx import nn

from tests.parity import tolerances
from tests.parity.held import apart
from vox_core.weights import CODECS
from vox_mlx.loss import weighted_nll

RANDOM = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def test_matmul():
    a, b = normal(64, 96), normal(96, 48)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    mine = np.array(mx.array(a) @ mx.array(b))
    other = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
    assert apart(mine, exact) < tolerances.PRODUCT
    assert apart(other, exact) < tolerances.PRODUCT


def test_biased_linear_logits():
    x, W, bias = normal(64, 96), normal(48, 96), normal(48)
    exact = x.astype(np.float64) @ W.T.astype(np.float64) + bias
    linear = nn.Linear(96, 48)
    linear.weight, linear.bias = mx.array(W), mx.array(bias)
    mine = np.array(linear(mx.array(x)))
    other = torch.nn.functional.linear(*map(torch.from_numpy, (x, W, bias))).numpy()
    assert apart(mine, exact) < tolerances.PRODUCT
    assert apart(other, exact) < tolerances.PRODUCT


@pytest.mark.parametrize("vocabulary", [260, 49152, 262144])
def test_cross_entropy_on_shared_logits(vocabulary):
    logits, targets = 3 * normal(8, vocabulary), RANDOM.integers(0, vocabulary, 8)
    wide = logits.astype(np.float64)
    exact = (np.log(np.exp(wide).sum(1)) - wide[np.arange(8), targets]).sum()
    mine = weighted_nll(mx.array(logits), mx.array(targets), mx.ones(8)).item()
    other = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits), torch.from_numpy(targets), reduction="sum"
    )
    assert mine == pytest.approx(exact, rel=tolerances.PRODUCT)
    assert other.item() == pytest.approx(exact, rel=tolerances.PRODUCT)


def test_the_gradient_of_cross_entropy_is_softmax_minus_one_hot():
    logits, targets = 3 * normal(8, 49152), RANDOM.integers(0, 49152, 8)
    wide = np.exp(logits.astype(np.float64))
    exact = wide / wide.sum(1, keepdims=True)
    exact[np.arange(8), targets] -= 1
    gradient = mx.grad(weighted_nll)(mx.array(logits), mx.array(targets), mx.ones(8))
    assert apart(np.array(gradient), exact) < tolerances.PRODUCT


@pytest.mark.parametrize("quant", ["affine4", "affine8", "mxfp4", "nvfp4"])
def test_a_product_with_quantised_weights_is_that_with_dequantised_ones(quant):
    from vox_mlx.base import FORMATS

    group_size, bits, mode = FORMATS[quant]
    x, W = normal(32, 128), normal(64, 128)
    plain = nn.Linear(128, 64, bias=False)
    plain.weight = mx.array(W)
    packed = nn.QuantizedLinear.from_linear(plain, group_size, bits, mode=mode)
    seen = CODECS[quant].round_trip(W).astype(np.float64)
    assert apart(np.array(packed(mx.array(x))), x.astype(np.float64) @ seen.T) < tolerances.PRODUCT
    assert apart(seen, W) > 1e-3
