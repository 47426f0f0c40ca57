"""What is left of a weight after NF4 and INT8, against the float64 reference for backend authors.

Against bitsandbytes itself: test_bitsandbytes_formats.py.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vox_formats.quant import CODECS, MLX_FORMATS
from vox_testing.quantised import round_trip

BF16, FP16, FP32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
OURS = ("nf4", "nf4-single", "int8")


def weight(*shape: int) -> np.ndarray:
    return (0.02 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def apart(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


# Blocks across rows, rows within blocks, a short last block, one value, and more blocks than are
# packed together.
@pytest.mark.parametrize("shape", [(3, 100), (40, 16), (5, 27), (1, 1), (300, 128)])
@pytest.mark.parametrize("quant", ["nf4", "nf4-single"])
def test_nf4_takes_every_width(quant, shape):
    W_OI = weight(*shape)
    flat = np.zeros((1, -(-W_OI.size // 64) * 64))
    flat[0, : W_OI.size] = W_OI.reshape(-1)
    expected = round_trip(quant, flat)[0, : W_OI.size].reshape(shape)
    assert CODECS[quant].fault(shape[1]) is None
    assert apart(CODECS[quant].round_trip(W_OI), expected) < 1e-6


@pytest.mark.parametrize("shape", [(3, 100), (1, 1), (64, 128)])
def test_int8_takes_every_width(shape):
    W_OI = weight(*shape)
    assert CODECS["int8"].fault(shape[1]) is None
    found = CODECS["int8"].round_trip(W_OI)
    assert apart(found, round_trip("int8", W_OI.astype(np.float64))) < 1e-6


def test_packing_the_scales_once_more_moves_weights_by_thousandths():
    """Seen with the float64 reference, for normal weights of six seeds: 1.6e-3 to 2.1e-3. Packed
    with 7 bits it would be 4e-3, and NF4 itself is 9e-2 from the weights."""
    W_OI = weight(192, 128)
    single, double = (CODECS[quant].round_trip(W_OI) for quant in ("nf4-single", "nf4"))
    assert 1e-3 < apart(double, single) < 3e-3
    assert 0.07 < apart(single, W_OI) < 0.11


@pytest.mark.parametrize("quant", OURS)
def test_a_weight_larger_than_a_chunk_is_quantised_as_one(monkeypatch, quant):
    W_OI = weight(33, 100)
    whole = CODECS[quant].round_trip(W_OI)
    monkeypatch.setattr("vox_formats.quant.CHUNK", 200)
    assert CODECS[quant].round_trip(W_OI).tobytes() == whole.tobytes()


@pytest.mark.parametrize("quant", OURS)
def test_what_is_left_is_rounded_once_to_the_dtype_it_is_computed_in(quant):
    W_OI = weight(16, 128).astype(BF16)
    exact = CODECS[quant].round_trip(W_OI, FP32)
    assert exact.dtype == FP32
    assert not np.array_equal(exact, exact.astype(BF16).astype(FP32))
    for dtype in (BF16, FP16):
        left = CODECS[quant].round_trip(W_OI, dtype)
        assert left.dtype == dtype
        assert left.tobytes() == exact.astype(dtype).tobytes()
    assert CODECS[quant].round_trip(W_OI).dtype == BF16


@pytest.mark.parametrize("quant", OURS)
def test_a_weight_that_is_stored_the_other_way_round_is_the_same_one(quant):
    W_OI = weight(24, 40)
    turned = np.ascontiguousarray(W_OI.T).T
    found, expected = CODECS[quant].round_trip(turned), CODECS[quant].round_trip(W_OI)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("quant", OURS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-37])
def test_zeros_and_numbers_without_an_inverse_stay_finite(quant, size):
    """Runs with warnings as errors: nothing is divided by zero on the way."""
    W_OI = np.full((4, 100), size, np.float32)
    left = CODECS[quant].round_trip(W_OI)
    assert np.abs(left - W_OI).max() <= 1e-37


# --- MLX's formats --------------------------------------------------------------------------------


def test_weights_larger_than_a_chunk_are_packed_as_one(monkeypatch):
    form, W = MLX_FORMATS["affine4"], weight(33, 128).astype(BF16)
    whole = form.quantise(W)
    monkeypatch.setattr("vox_formats.quant.CHUNK", 4 * 128)
    for one, other in zip(form.quantise(W), whole, strict=True):
        assert one.tobytes() == other.tobytes()
    assert form.round_trip(W).tobytes() == form.dequantise(whole, BF16).tobytes()


@pytest.mark.parametrize("quant", MLX_FORMATS)
def test_what_is_left_of_a_weight_is_near_it(quant):
    W = weight(8, 128)
    left = MLX_FORMATS[quant].round_trip(W)
    off = np.linalg.norm(left - W) / np.linalg.norm(W)
    # For normal weights, seen: affine4 0.08, affine8 0.005, mxfp4 0.15, nvfp4 0.1.
    assert off < {"affine4": 0.12, "affine8": 0.008, "mxfp4": 0.2, "nvfp4": 0.15}[quant]
