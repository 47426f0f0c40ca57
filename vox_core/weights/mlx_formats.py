"""MLX's formats, in numpy: what `mx.quantize` and `mx.dequantize` make of a weight.

They can be written to files as well (`MlxFormat.quantise`), in the layout that MLX reads:

    weight   uint32 (O, I * bits / 32), the lowest bits first
    scales   (O, I / group), of the weight's dtype; uint8 in the fp4 formats
    biases   as the scales; the fp4 formats have none

    affine   W = scale * q + bias, one scale and one bias a group
    mxfp4    W = 2^(scale - 127) * e2m1, groups of 32 (OCP microscaling formats 1.0)
    nvfp4    W = e4m3 * e2m1, groups of 16

Bit for bit what MLX 0.32 gives on the CPU, with its rounding to the weight's dtype at every
operation (tests/parity/test_mlx_formats.py). MLX's kernels for GPUs may decide a tie, or a group of
one sign, otherwise; the MLX backend quantises on the CPU.

Shape legend: O output features, I input features, G groups, S elements of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from vox_core.contract import Quant
from vox_core.weights.chunks import row_chunks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]


class Packed(NamedTuple):
    """A quantised weight, as MLX stores it. `biases` is None in the fp4 formats."""

    weight: Array
    scales: Array
    biases: Array | None


@dataclass(frozen=True, slots=True)
class MlxFormat:
    """One of MLX's formats."""

    mode: Literal["affine", "mxfp4", "nvfp4"]
    bits: int
    group_size: int

    def fault(self, in_features: int) -> str | None:
        if in_features % self.group_size == 0:
            return None
        return f"{in_features} input features are not divisible by its group of {self.group_size}"

    def round_trip(self, W_OI: Array, dtype: np.dtype[Any] | None = None) -> Array:
        return self.dequantise(self.quantise(W_OI), dtype or W_OI.dtype)

    def quantise(self, W_OI: Array) -> Packed:
        """The packed weight."""
        import numpy as np

        parts = [self._quantise(W_OI[rows]) for rows in row_chunks(W_OI.shape)]
        biases = [part.biases for part in parts if part.biases is not None]
        return Packed(
            np.concatenate([part.weight for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate(biases) if biases else None,
        )

    def dequantise(self, packed: Packed, dtype: np.dtype[Any]) -> Array:
        """The weight (O, I), computed in `dtype`, which scales and biases are rounded to first."""
        import numpy as np

        out_features, width = packed.weight.shape
        out = np.empty((out_features, width * 32 // self.bits), dtype)
        for rows in row_chunks(out.shape):
            biases = None if packed.biases is None else packed.biases[rows]
            some = Packed(packed.weight[rows], packed.scales[rows], biases)
            out[rows] = self._dequantise(some, dtype)
        return out

    def _quantise(self, W_OI: Array) -> Packed:
        import numpy as np

        W_GS = np.ascontiguousarray(W_OI).reshape(-1, self.group_size)
        with np.errstate(all="ignore"):  # groups of zeros divide by zero, as they do in MLX
            if self.mode == "affine":
                codes_GS, scales_G, biases_G = _affine(W_GS, self.bits)
                biases = biases_G.reshape(len(W_OI), -1)
            else:
                codes_GS, scales_G = (_mxfp4 if self.mode == "mxfp4" else _nvfp4)(W_GS)
                biases = None
        weight = _pack(codes_GS.reshape(len(W_OI), -1), self.bits)
        return Packed(weight, scales_G.reshape(len(W_OI), -1), biases)

    def _dequantise(self, packed: Packed, dtype: np.dtype[Any]) -> Array:
        import numpy as np

        codes_OI = _unpack(packed.weight, self.bits)
        codes_GS = codes_OI.reshape(-1, self.group_size)
        with np.errstate(all="ignore"):
            if self.mode == "affine":
                assert packed.biases is not None
                scale_G1 = packed.scales.reshape(-1, 1).astype(dtype)
                bias_G1 = packed.biases.reshape(-1, 1).astype(dtype)
                W_GS = codes_GS.astype(dtype) * scale_G1 + bias_G1
            else:
                scale_of = _from_e8m0 if self.mode == "mxfp4" else _from_e4m3
                W_GS = _e2m1(dtype)[codes_GS] * scale_of(packed.scales.reshape(-1, 1), dtype)
        W_OI: Array = W_GS.reshape(codes_OI.shape)
        return W_OI

    def describe(self) -> dict[str, Any]:
        """What `config.json` says of it under `quantization`."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


MLX_FORMATS: Mapping[Quant, MlxFormat] = {
    "affine4": MlxFormat("affine", 4, 64),
    "affine8": MlxFormat("affine", 8, 64),
    "mxfp4": MlxFormat("mxfp4", 4, 32),
    "nvfp4": MlxFormat("nvfp4", 4, 16),
}
"""The formats that can be written to files, with MLX's own group sizes."""


def _affine(W_GS: Array, bits: int) -> tuple[Array, Array, Array]:
    """Codes, scales, biases. The end of the range with the larger magnitude is met exactly, and
    zero as well wherever it lies within the range."""
    import numpy as np

    x_GS, bins, smallest = W_GS.astype(np.float32), np.float32(2**bits - 1), np.float32(1e-7)
    low_G, high_G = x_GS.min(axis=1), x_GS.max(axis=1)
    below_G = np.abs(low_G) > np.abs(high_G)
    scale_G = np.maximum((high_G - low_G) / bins, smallest)
    scale_G = np.where(below_G, scale_G, -scale_G)
    edge_G = np.where(below_G, low_G, high_G)
    steps_G = np.rint(edge_G / scale_G)
    met_G = steps_G != 0
    scale_G = np.where(met_G, edge_G / steps_G, scale_G)
    bias_G = np.where(met_G, edge_G, np.float32(0))
    codes_GS = np.clip(np.rint((x_GS - bias_G[:, None]) / scale_G[:, None]), 0, bins)
    return codes_GS.astype(np.uint32), scale_G.astype(W_GS.dtype), bias_G.astype(W_GS.dtype)


def _mxfp4(W_GS: Array) -> tuple[Array, Array]:
    import numpy as np

    dtype = W_GS.dtype
    scale_G = np.abs(W_GS).max(axis=1) / dtype.type(6)
    mantissa_G, exponent_G = np.frexp(scale_G.astype(np.float32))
    exponent_G -= mantissa_G == 0.5  # the smallest power of two that is not below the scale
    power_G = np.ldexp(np.float32(1), exponent_G).astype(dtype)
    return _to_e2m1(W_GS / power_G[:, None]), (exponent_G + 127).astype(np.uint8)


def _nvfp4(W_GS: Array) -> tuple[Array, Array]:
    import ml_dtypes
    import numpy as np

    dtype = W_GS.dtype
    scale_G = (np.abs(W_GS).max(axis=1) / dtype.type(6)).astype(np.float32)
    # MLX saturates where the cast would give NaN.
    e4m3_G = np.minimum(scale_G, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    return _to_e2m1(W_GS / e4m3_G.astype(dtype)[:, None]), e4m3_G.view(np.uint8)


def _to_e2m1(x_GS: Array) -> Array:
    """The nearest value's code; of two equally near the smaller one's, and never minus zero."""
    import numpy as np

    halfway = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    size_GS = np.abs(x_GS.astype(np.float32))
    codes_GS = np.searchsorted(halfway, size_GS, side="left").astype(np.uint32)
    codes_GS[~np.isfinite(size_GS)] = 0
    far_F = size_GS > 64
    codes_GS[far_F] = _nearest(size_GS[far_F])
    negative_GS = np.signbit(x_GS) & (codes_GS > 0)
    codes_GS |= negative_GS.astype(np.uint32) << np.uint32(3)
    return codes_GS


def _nearest(size_F: Array) -> Array:
    """The same for sizes far beyond the format, where float32 no longer tells 6 from 4, or from 0:
    MLX takes the first of all that seem equally near."""
    import numpy as np

    distance_FS = np.abs(size_F[:, None] - _e2m1(np.dtype(np.float32))[:8])
    codes_F: Array = distance_FS.argmin(axis=1).astype(np.uint32)
    return codes_F


@functools.cache
def _e2m1(dtype: np.dtype[Any]) -> Array:
    """The sixteen values by their codes."""
    import numpy as np

    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([sizes, -sizes]).astype(dtype)


def _from_e8m0(scales: Array, dtype: np.dtype[Any]) -> Array:
    import numpy as np

    powers: Array = np.exp2((scales.astype(np.float32) - 127).astype(dtype))
    return powers


def _from_e4m3(scales: Array, dtype: np.dtype[Any]) -> Array:
    import ml_dtypes

    values: Array = scales.view(ml_dtypes.float8_e4m3fn).astype(dtype)
    return values


def _pack(codes_OI: Array, bits: int) -> Array:
    import numpy as np

    if bits == 4:
        codes_OI = codes_OI[:, ::2] | (codes_OI[:, 1::2] << np.uint32(4))
    return np.ascontiguousarray(codes_OI.astype(np.uint8)).view("<u4")


def _unpack(weight: Array, bits: int) -> Array:
    import numpy as np

    bytes_OB = np.ascontiguousarray(weight).view(np.uint8)
    if bits == 8:
        return bytes_OB
    return np.stack([bytes_OB & 15, bytes_OB >> 4], axis=-1).reshape(len(weight), -1)
