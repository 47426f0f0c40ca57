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
from vox_formats.quant import CODECS, MLX_FORMATS
from vox_mlx.loss import nll
from vox_torch.loss import negative_log_likelihood

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
    """And its gradient, softmax minus one-hot, times the weights.

    A spread of 4 is where adding a vocabulary up in one go loses most: torch's `cross_entropy`,
    which vox does not use, is 1.2e-6 too low there, its gradient 4e-6 off; what vox uses, 1.5e-7.
    """
    logits, targets = 4 * normal(8, vocabulary), RANDOM.integers(0, vocabulary, 8)
    weights = RANDOM.integers(1, 9, 8).astype(np.float32) / 4
    wide = logits.astype(np.float64)
    exact = (weights * (np.log(np.exp(wide).sum(1)) - wide[np.arange(8), targets])).sum()
    slope = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    slope[np.arange(8), targets] -= 1

    for loss, gradient in (mlx_nll(logits, targets, weights), torch_nll(logits, targets, weights)):
        assert loss == pytest.approx(exact, rel=tolerances.PRODUCT)
        assert apart(gradient, weights[:, None] * slope) < tolerances.PRODUCT


def mlx_nll(
    logits: np.ndarray, targets: np.ndarray, weights: np.ndarray
) -> tuple[float, np.ndarray]:
    """`sum(weight * nll)` as the MLX backend has it, and its gradient."""

    def loss(logits_KV: mx.array) -> mx.array:
        return (nll(logits_KV, mx.array(targets)) * mx.array(weights)).sum()

    value, gradient = mx.value_and_grad(loss)(mx.array(logits))
    return value.item(), np.array(gradient)


def torch_nll(
    logits: np.ndarray, targets: np.ndarray, weights: np.ndarray
) -> tuple[float, np.ndarray]:
    """`sum(weight * nll)` as the torch engine has it, and its gradient."""
    leaf = torch.from_numpy(logits).requires_grad_()
    nll_K = negative_log_likelihood(leaf, torch.from_numpy(targets))
    nll = (nll_K * torch.from_numpy(weights)).sum()
    nll.backward()
    return nll.item(), leaf.grad.numpy()


@pytest.mark.parametrize("quant", ["affine4", "affine8", "mxfp4", "nvfp4"])
def test_a_product_with_quantised_weights_is_that_with_dequantised_ones(quant):
    described = MLX_FORMATS[quant].describe()
    group_size, bits, mode = (described[key] for key in ("group_size", "bits", "mode"))
    x, W = normal(32, 128), normal(64, 128)
    plain = nn.Linear(128, 64, bias=False)
    plain.weight = mx.array(W)
    packed = nn.QuantizedLinear.from_linear(plain, group_size, bits, mode=mode)
    seen = CODECS[quant].round_trip(W).astype(np.float64)
    assert apart(np.array(packed(mx.array(x))), x.astype(np.float64) @ seen.T) < tolerances.PRODUCT
    assert apart(seen, W) > 1e-3
