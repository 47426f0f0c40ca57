"""Quantisations of a weight in numpy: NF4, INT8 and MLX's formats.

`CODECS` has every format by vox's name. Each equals, bit for bit and on every machine, the library
that backends quantise with, on the CPU:

    nf4, nf4-single                  bitsandbytes 0.50    tests/test_bitsandbytes_formats.py
    int8                             bitsandbytes 0.50, from float32
    affine4, affine8, mxfp4, nvfp4   MLX 0.32             tests/test_mlx_formats.py

**NF4** (Dettmers et al. 2023, arXiv:2305.14314, sections 3 and E): sixteen levels of a normal
distribution, times the largest magnitude of a block of 64 values. A block is values next to one
another in the flattened weight (rows one after another, whatever their width); the last may be
shorter. In float32, each operation rounded by itself, from the weight as it is stored:

    scale_G = max_S |W_GS|
    q_GS    = the level nearest to W_GS * (1 / scale_G)       W / scale in a short last block
    W'_GS   = level[q_GS] * scale_G                           rounded once, to the dtype

Double quantisation packs the scales once more, 256 at a time (`pack_scales`):

    offset  = mean_G(scale_G)                                 in float64, rounded to float32
    most_C  = max_P |scale_CP - offset|
    s_CP    = the level of 8 bits nearest to (scale_CP - offset) * (1 / most_C)
    scale'  = level8[s_CP] * most_C + offset

where the levels of 8 bits are a float with as many bits for the fraction as the exponent leaves it
(Dettmers 2015, arXiv:1511.04561). "Nearest" there is nearest to the middle of one of 65536 bins
between -1 and 1, by which bitsandbytes looks it up. The offset alone may differ from bitsandbytes',
whose mean is in float32: its last bits depend on the machine's order of summation.

**INT8** by rows (Dettmers et al. 2022, arXiv:2208.07339, section 2, the weights' part of it): 127
steps to either side of zero, one scale an output feature. In float32, as above:

    scale_O = max(max_I |W_OI|, 1e-36)
    q_OI    = round_half_even(W_OI * ((1 / scale_O) * 127))       int8, -127 to 127
    step_O  = scale_O / 127
    W'_OI   = q_OI * step_O                                       rounded once, to the dtype

bitsandbytes' layers hand it float16, which rounds a weight in float32 first (relative distance
2e-3) and lacks the range of bfloat16; this module does not. The least scale
keeps rows of zeros finite, and rows whose scale has an inverse beyond float32.

**MLX's formats**, as `mx.quantize` and `mx.dequantize` compute them, rounding to the weight's dtype
at every operation. These can be stored (`MlxFormat.quantise`), in the layout that MLX reads:

    weight   uint32 (O, I * bits / 32), the lowest bits first
    scales   (O, I / group), of the weight's dtype; uint8 in the fp4 formats
    biases   as the scales; the fp4 formats have none

    affine   W = scale * q + bias, one scale and one bias a group
    mxfp4    W = 2^(scale - 127) * e2m1, groups of 32 (OCP microscaling formats 1.0)
    nvfp4    W = e4m3 * e2m1, groups of 16

MLX's kernels for GPUs may decide a tie, or a group of one sign, otherwise; the MLX backend
quantises on the CPU.

Shape legend: O output features, I input features, N values of a weight, G blocks or groups, S
values of one, C blocks of scales, P scales of such a block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

CHUNK = 4 << 20
"""Elements computed at a time: a few arrays of 16 MB in float32."""


class Codec(Protocol):
    """A quantisation as a round trip of numbers, without a storage layout."""

    def fault(self, in_features: int) -> str | None:
        """Return why a module of this width cannot be quantised; None if it can."""
        ...

    def round_trip(self, W_OI: Array, dtype: np.dtype[Any] | None = None) -> Array:
        """Quantise `W_OI` in its own dtype, and dequantise it.

        Args:
            dtype: dtype of the computation and the result; by default that of `W_OI`.
        """
        ...


def _row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    rows = max(1, CHUNK // max(1, shape[-1]))
    return (slice(start, start + rows) for start in range(0, shape[0], rows))


# --- NF4 ------------------------------------------------------------------------------------------

BLOCK = 64
SCALE_BLOCK = 256
LEVELS = np.array(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    np.float32,
)
_BINS = 1 << 16
LEAST_SCALE = 1e-38
"""Least scale that is divided by; smaller ones have an inverse that float32 has not got."""


class PackedScales(NamedTuple):
    """Scales of blocks after double quantisation, as bitsandbytes holds them.

    Attributes:
        codes_G: uint8, places in `scale_levels()`.
        most_C: float32, the largest magnitude of 256 scales less the offset.
        offset: float32, the mean of all scales.
    """

    codes_G: Array
    most_C: Array
    offset: np.float32


@dataclass(frozen=True, slots=True)
class Nf4:
    """bitsandbytes' NF4, for every width.

    Args:
        double: pack the scales once more.
    """

    double: bool

    def fault(self, in_features: int) -> str | None:
        return None

    def round_trip(self, W_OI: Array, dtype: np.dtype[Any] | None = None) -> Array:
        W_N = np.ascontiguousarray(W_OI).reshape(-1)
        scale_G = _scales(W_N)
        left_G = unpack_scales(pack_scales(scale_G)) if self.double else scale_G
        left_N = np.empty(W_N.shape, dtype or W_OI.dtype)
        for values, blocks in _block_chunks(len(W_N)):
            codes_GS = _codes(W_N[values], scale_G[blocks])
            left_GS = LEVELS[codes_GS] * left_G[blocks, None]
            left_N[values] = left_GS.reshape(-1)[: len(left_N[values])]
        return left_N.reshape(W_OI.shape)


def pack_scales(scale_G: Array) -> PackedScales:
    """Quantise the float32 scales of a whole weight (double quantisation)."""
    offset = np.float32(scale_G.mean(dtype=np.float64))
    centred_CP = _in_blocks(scale_G - offset, SCALE_BLOCK)
    most_C = np.abs(centred_CP).max(axis=1)
    scaled_CP = centred_CP * _inverse(most_C)[:, None]
    middle = np.float32(0.5)
    bins_CP = (np.clip(scaled_CP, -1, 1) + np.float32(1)) * middle * np.float32(_BINS - 1) + middle
    codes_CP = _code_of_bin()[bins_CP.astype(np.int64)]
    return PackedScales(codes_CP.reshape(-1)[: len(scale_G)], most_C, offset)


def unpack_scales(packed: PackedScales) -> Array:
    """Return the scales (G) after packing, in float32."""
    levels_CP = _in_blocks(scale_levels()[packed.codes_G], SCALE_BLOCK)
    left_CP = levels_CP * packed.most_C[:, None] + packed.offset
    left_G: Array = left_CP.reshape(-1)[: len(packed.codes_G)]
    return left_G


@functools.cache
def scale_levels() -> Array:
    """Return the 256 levels of packed scales, ascending float32: bitsandbytes'
    `create_dynamic_map()`.

    Seven powers of ten, divided into 1, 2, 4, ... 64 steps of which the middles are levels, to
    either side of zero; zero itself, and 1.
    """
    middles = [np.float32(10.0**power) * _middles(2 ** (power + 6)) for power in range(-6, 1)]
    sizes = np.concatenate(middles)
    ends = np.array([0, 1], np.float32)
    return np.sort(np.concatenate([-sizes, sizes, ends]))


def _middles(steps: int) -> Array:
    """Return the middles of equal steps from 0.1 to 1, with `torch.linspace`'s float32 rounding of
    their ends."""
    low, high = np.float32(0.1), np.float32(1)
    width = np.float64((high - low) / np.float32(steps))
    place = np.arange(steps + 1)
    from_low, from_high = np.float64(low) + width * place, high - width * (steps - place)
    ends = np.where(place < (steps + 1) // 2, from_low, from_high).astype(np.float32)
    middles: Array = (ends[:-1] + ends[1:]) / np.float32(2)
    return middles


@functools.cache
def _code_of_bin() -> Array:
    """Return the code of each bin: the level nearest to its middle, the lower at a tie."""
    place = np.arange(_BINS, dtype=np.float32)
    value = np.float32(-1) + np.float32(2) * place / np.float32(_BINS - 1)
    return np.searchsorted(_midpoints(scale_levels()), value, side="left").astype(np.uint8)


def _midpoints(levels: Array) -> Array:
    midpoints: Array = (levels[:-1] + levels[1:]) / np.float32(2)
    return midpoints


def _scales(W_N: Array) -> Array:
    parts = [np.abs(_in_blocks(W_N[v], BLOCK)).max(axis=1) for v, _ in _block_chunks(len(W_N))]
    return np.concatenate(parts)


def _codes(W_N: Array, scale_G: Array) -> Array:
    """Return the codes (G, S) of blocks; the last block of a weight is filled with zeros."""
    W_GS = _in_blocks(W_N, BLOCK)
    scaled_GS = W_GS * _inverse(scale_G)[:, None]
    if len(W_N) % BLOCK:
        scaled_GS[-1] = W_GS[-1] / np.maximum(scale_G[-1], np.float32(LEAST_SCALE))
    codes_GS = np.zeros(scaled_GS.shape, np.uint8)
    for midpoint in _midpoints(LEVELS):  # several times faster than a search
        codes_GS += scaled_GS > midpoint
    return codes_GS


def _inverse(scale: Array) -> Array:
    inverse: Array = np.float32(1) / np.maximum(scale, np.float32(LEAST_SCALE))
    return inverse


def _in_blocks(values: Array, size: int) -> Array:
    """Return float32 rows of `size`, the last filled with zeros."""
    if len(values) % size == 0:
        return values.reshape(-1, size).astype(np.float32)
    filled = np.zeros(-(-len(values) // size) * size, np.float32)
    filled[: len(values)] = values
    return filled.reshape(-1, size)


def _block_chunks(values: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices over the values of a flat weight, of whole blocks, and over their blocks."""
    blocks = max(1, CHUNK // BLOCK)
    for start in range(0, -(-values // BLOCK), blocks):
        yield slice(start * BLOCK, (start + blocks) * BLOCK), slice(start, start + blocks)


# --- INT8 -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Int8:
    """INT8 by rows, without parameters, for every width."""

    def fault(self, in_features: int) -> str | None:
        return None

    def round_trip(self, W_OI: Array, dtype: np.dtype[Any] | None = None) -> Array:
        left_OI = np.empty(W_OI.shape, dtype or W_OI.dtype)
        for rows in _row_chunks(W_OI.shape):
            left_OI[rows] = _int8_round_trip(W_OI[rows].astype(np.float32))
        return left_OI


def _int8_round_trip(W_OI: Array) -> Array:
    """Round-trip in float32; the inverse is taken before the product, as `127 / scale` in torch
    does, which rounds twice."""
    steps, least = np.float32(127), np.float32(1e-36)
    scale_O1 = np.maximum(np.abs(W_OI).max(axis=1, keepdims=True), least)
    codes_OI = np.rint(W_OI * (np.float32(1) / scale_O1 * steps)).astype(np.int8)
    left_OI: Array = codes_OI * (scale_O1 / steps)
    return left_OI


# --- MLX's formats --------------------------------------------------------------------------------


class Packed(NamedTuple):
    """A quantised weight, as MLX stores it. `biases` is None in the fp4 formats."""

    weight: Array
    scales: Array
    biases: Array | None


@dataclass(frozen=True, slots=True)
class MlxFormat:
    """A quantisation format of MLX."""

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
        """Return the packed weight."""
        parts = [self._quantise(W_OI[rows]) for rows in _row_chunks(W_OI.shape)]
        biases = [part.biases for part in parts if part.biases is not None]
        return Packed(
            np.concatenate([part.weight for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate(biases) if biases else None,
        )

    def dequantise(self, packed: Packed, dtype: np.dtype[Any]) -> Array:
        """Return the weight (O, I), computed in `dtype`, to which scales and biases are rounded
        first."""
        out_features, width = packed.weight.shape
        out = np.empty((out_features, width * 32 // self.bits), dtype)
        for rows in _row_chunks(out.shape):
            biases = None if packed.biases is None else packed.biases[rows]
            some = Packed(packed.weight[rows], packed.scales[rows], biases)
            out[rows] = self._dequantise(some, dtype)
        return out

    def _quantise(self, W_OI: Array) -> Packed:
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
        """Return its entry in `config.json`, under `quantization`."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


MLX_FORMATS: Mapping[str, MlxFormat] = {
    "affine4": MlxFormat("affine", 4, 64),
    "affine8": MlxFormat("affine", 8, 64),
    "mxfp4": MlxFormat("mxfp4", 4, 32),
    "nvfp4": MlxFormat("nvfp4", 4, 16),
}
"""The formats that can be written to files, with MLX's own group sizes."""

FLOATS = ("F32", "F16", "BF16")
"""Names in safetensors files of the dtypes that affine scales may have."""


class StoredTensor(Protocol):
    """A tensor in a file: its dtype by safetensors' name, and its shape."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def named_format(said: Mapping[str, Any]) -> tuple[str, MlxFormat] | None:
    """Return vox's name of the format that an entry of `config.json` describes, and the format with
    the group size of the entry."""
    group = said.get("group_size")
    for name, form in MLX_FORMATS.items():
        sizes = (32, 64, 128) if form.mode == "affine" else (form.group_size,)
        alike = (said.get("mode", "affine"), said.get("bits")) == (form.mode, form.bits)
        if alike and group in sizes:
            return name, MlxFormat(form.mode, form.bits, int(str(group)))
    return None


def stored_fault(path: str, form: MlxFormat, tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the inconsistency in one module's tensors; None if there is none.

    Args:
        path: of a matrix (O, I), or of mlx-lm's stack of experts (E, O, I), `….switch_mlp.X`.
    """
    parts = [".weight", ".scales", *([".biases"] if form.mode == "affine" else [])]
    if missing := [part for part in parts if f"{path}{part}" not in tensors]:
        return f"{path}: it has no {', '.join(part[1:] for part in missing)}"
    if f"{path}.global_scale" in tensors:
        return f"{path}: it has a scale of the whole tensor, too"
    weight, *rest = (tensors[f"{path}{part}"] for part in parts)
    axes = "three" if ".switch_mlp." in path else "two"
    if weight.dtype != "U32" or len(weight.shape) != {"two": 2, "three": 3}[axes]:
        found = f"{weight.dtype} {list(weight.shape)}"
        return f"{path}.weight: found {found}, expected U32, {axes} axes"
    shape = (*weight.shape[:-1], weight.shape[-1] * 32 // form.bits // form.group_size)
    dtypes = FLOATS if form.mode == "affine" else ("U8",)
    for part, info in zip(parts[1:], rest, strict=True):
        if info.shape != shape or info.dtype not in dtypes:
            return (
                f"{path}{part}: found {info.dtype} {list(info.shape)}, "
                f"expected {' or '.join(dtypes)} {list(shape)}"
            )
    return None


def _affine(W_GS: Array, bits: int) -> tuple[Array, Array, Array]:
    """Return codes, scales, biases; the larger end of the range is exact, and zero if within it."""
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
    dtype = W_GS.dtype
    scale_G = np.abs(W_GS).max(axis=1) / dtype.type(6)
    mantissa_G, exponent_G = np.frexp(scale_G.astype(np.float32))
    exponent_G -= mantissa_G == 0.5  # the smallest power of two that is not below the scale
    power_G = np.ldexp(np.float32(1), exponent_G).astype(dtype)
    return _to_e2m1(W_GS / power_G[:, None]), (exponent_G + 127).astype(np.uint8)


def _nvfp4(W_GS: Array) -> tuple[Array, Array]:
    dtype = W_GS.dtype
    scale_G = (np.abs(W_GS).max(axis=1) / dtype.type(6)).astype(np.float32)
    # MLX saturates where the cast would give NaN.
    e4m3_G = np.minimum(scale_G, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    return _to_e2m1(W_GS / e4m3_G.astype(dtype)[:, None]), e4m3_G.view(np.uint8)


def _to_e2m1(x_GS: Array) -> Array:
    """Return the code of the nearest value; the smaller at a tie, and never minus zero."""
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
    """Like `_to_e2m1`, for sizes beyond float32's resolution of the levels, where MLX takes the
    first of equally near ones."""
    distance_FS = np.abs(size_F[:, None] - _e2m1(np.dtype(np.float32))[:8])
    codes_F: Array = distance_FS.argmin(axis=1).astype(np.uint32)
    return codes_F


@functools.cache
def _e2m1(dtype: np.dtype[Any]) -> Array:
    """Return the sixteen values by their codes."""
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([sizes, -sizes]).astype(dtype)


def _from_e8m0(scales: Array, dtype: np.dtype[Any]) -> Array:
    powers: Array = np.exp2((scales.astype(np.float32) - 127).astype(dtype))
    return powers


def _from_e4m3(scales: Array, dtype: np.dtype[Any]) -> Array:
    values: Array = scales.view(ml_dtypes.float8_e4m3fn).astype(dtype)
    return values


def _pack(codes_OI: Array, bits: int) -> Array:
    if bits == 4:
        codes_OI = codes_OI[:, ::2] | (codes_OI[:, 1::2] << np.uint32(4))
    return np.ascontiguousarray(codes_OI.astype(np.uint8)).view("<u4")


def _unpack(weight: Array, bits: int) -> Array:
    bytes_OB = np.ascontiguousarray(weight).view(np.uint8)
    if bits == 8:
        return bytes_OB
    return np.stack([bytes_OB & 15, bytes_OB >> 4], axis=-1).reshape(len(weight), -1)


CODECS: Mapping[str, Codec] = {
    "nf4": Nf4(double=True),
    "nf4-single": Nf4(double=False),
    "int8": Int8(),
    **MLX_FORMATS,
}
"""Every format by vox's name."""
