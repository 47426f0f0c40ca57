"""The quantisations in numpy against MLX's own on the CPU: every bit of codes, scales and biases,
and of the weights that are left."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from vox_formats.quant import MLX_FORMATS, MlxFormat

mx = pytest.importorskip("mlx.core")

BF16, FP16, FP32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
DTYPES = {BF16: mx.bfloat16, FP16: mx.float16, FP32: mx.float32}
FORMATS = [
    *(MlxFormat("affine", bits, group) for bits in (4, 8) for group in (32, 64, 128)),
    MLX_FORMATS["mxfp4"],
    MLX_FORMATS["nvfp4"],
]


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with mx.stream(mx.cpu):
        yield


def to_mlx(array: np.ndarray):
    return mx.array(array.astype(np.float32)).astype(DTYPES[array.dtype])


def to_numpy(array) -> np.ndarray:
    if array.dtype == mx.bfloat16:
        return np.array(array.astype(mx.float32)).astype(BF16)
    return np.array(array)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    numbers = [a.astype(np.float32) if a.dtype == BF16 else a for a in (one, other)]
    floats = np.issubdtype(numbers[0].dtype, np.floating)
    return one.dtype == other.dtype and np.array_equal(*numbers, equal_nan=floats)


def groups(dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Matrices whose groups are ordinary and odd."""
    random = np.random.default_rng(0)

    def normal(size: float) -> np.ndarray:
        return random.standard_normal((64, 512)) * size

    yield "like weights", normal(0.02)
    yield "of one", normal(1)
    yield "large", normal(1e4)
    yield "tiny", normal(1e-6)
    yield "below the smallest scale", normal(1e-9)
    yield "zeros", np.zeros((4, 512))
    yield "all equal", np.full((4, 512), 0.37)
    yield "all equal and negative", np.full((4, 512), -3.0)
    yield "positive", np.abs(normal(1))
    yield "negative", -np.abs(normal(1))
    yield "integers, many ties", np.rint(normal(4))
    yield "every other element zero", normal(1) * (np.arange(512) % 2)
    yield "every other row zero", normal(1) * (np.arange(64) % 2)[:, None]
    yield "near the largest number", normal(1) * float(ml_dtypes.finfo(dtype).max) / 10
    signs = random.choice([-1, 1], (64, 512))
    yield "of all sizes", signs * np.exp2(random.uniform(-30, 14, (64, 512)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f"{f.mode}-{f.bits}-{f.group_size}")
def test_every_bit_is_mlxs(form, dtype):
    how = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
    for name, values in groups(dtype):
        with np.errstate(over="ignore"):
            W_OI = values.astype(dtype)
        theirs = mx.quantize(to_mlx(W_OI), **how)
        ours = form.quantise(W_OI)
        for part, expected in zip(ours, theirs, strict=False):
            assert same(part, to_numpy(expected)), name
        assert (ours.biases is None) == (len(theirs) == 2)
        left = mx.dequantize(*theirs, **how, dtype=DTYPES[dtype])
        assert same(form.dequantise(ours, dtype), to_numpy(left)), name


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("quant", ["mxfp4", "nvfp4"])
def test_the_scale_of_every_number_there_is(quant, dtype):
    form = MLX_FORMATS[quant]
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    W_OI = np.zeros((len(numbers), 64), dtype)
    W_OI[:, 0] = W_OI[:, 33] = numbers
    W_OI[:, 32] = 1
    weight, scales = mx.quantize(
        to_mlx(W_OI), group_size=form.group_size, bits=form.bits, mode=form.mode
    )
    ours = form.quantise(W_OI)
    assert same(ours.scales, to_numpy(scales))
    assert same(ours.weight, to_numpy(weight))


def test_a_dtype_to_compute_in_is_that_of_a_model_cast_after_it_was_quantised():
    form = MLX_FORMATS["affine4"]
    W_OI = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    weight, scales, biases = mx.quantize(to_mlx(W_OI), group_size=64, bits=4)
    cast = mx.dequantize(
        weight, scales.astype(mx.bfloat16), biases.astype(mx.bfloat16), group_size=64, bits=4
    )
    assert same(form.round_trip(W_OI, BF16), to_numpy(cast))
