"""NF4: sixteen levels of a normal distribution, times the largest magnitude of 64 values.

Dettmers et al. 2023, arXiv:2305.14314, sections 3 and E. A block is 64 values next to one another
in the flattened weight (rows one after another, whatever their width); the last may be shorter. In
float32, each operation rounded by itself, from the weight as it is stored:

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
between -1 and 1, by which bitsandbytes looks it up.

Bit for bit what bitsandbytes 0.50 gives on the CPU (tests/parity/test_bitsandbytes_formats.py),
but for the offset: its own mean is in float32, whose last bits depend on the machine's order of
summation.

Shape legend: O output features, I input features, N values of a weight, G blocks, S values of a
block (64), C blocks of scales, P scales of such a block (256).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vox_core.weights import chunks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

BLOCK = 64
SCALE_BLOCK = 256
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_BINS = 1 << 16
_LEAST = 1e-38
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
    """The format, which takes every width.

    Args:
        double: pack the scales once more.
    """

    double: bool

    def fault(self, in_features: int) -> str | None:
        return None

    def round_trip(self, W_OI: Array, dtype: np.dtype[Any] | None = None) -> Array:
        import numpy as np

        W_N = np.ascontiguousarray(W_OI).reshape(-1)
        scale_G = _scales(W_N)
        left_G = unpack_scales(pack_scales(scale_G)) if self.double else scale_G
        left_N = np.empty(W_N.shape, dtype or W_OI.dtype)
        for values, blocks in _block_chunks(len(W_N)):
            codes_GS = _codes(W_N[values], scale_G[blocks])
            left_GS = _levels()[codes_GS] * left_G[blocks, None]
            left_N[values] = left_GS.reshape(-1)[: len(left_N[values])]
        return left_N.reshape(W_OI.shape)


def pack_scales(scale_G: Array) -> PackedScales:
    """Double quantisation of the scales of a whole weight, float32."""
    import numpy as np

    offset = np.float32(scale_G.mean(dtype=np.float64))
    centred_CP = _in_blocks(scale_G - offset, SCALE_BLOCK)
    most_C = np.abs(centred_CP).max(axis=1)
    scaled_CP = centred_CP * _inverse(most_C)[:, None]
    middle = np.float32(0.5)
    bins_CP = (np.clip(scaled_CP, -1, 1) + np.float32(1)) * middle * np.float32(_BINS - 1) + middle
    codes_CP = _code_of_bin()[bins_CP.astype(np.int64)]
    return PackedScales(codes_CP.reshape(-1)[: len(scale_G)], most_C, offset)


def unpack_scales(packed: PackedScales) -> Array:
    """What is left of the scales (G), float32."""
    levels_CP = _in_blocks(scale_levels()[packed.codes_G], SCALE_BLOCK)
    left_CP = levels_CP * packed.most_C[:, None] + packed.offset
    left_G: Array = left_CP.reshape(-1)[: len(packed.codes_G)]
    return left_G


@functools.cache
def scale_levels() -> Array:
    """The 256 levels of packed scales, ascending float32: bitsandbytes' `create_dynamic_map()`.

    Seven powers of ten, divided into 1, 2, 4, ... 64 steps of which the middles are levels, to
    either side of zero; zero itself, and 1.
    """
    import numpy as np

    middles = [np.float32(10.0**power) * _middles(2 ** (power + 6)) for power in range(-6, 1)]
    sizes = np.concatenate(middles)
    ends = np.array([0, 1], np.float32)
    return np.sort(np.concatenate([-sizes, sizes, ends]))


def _middles(steps: int) -> Array:
    """The middles of equal steps from 0.1 to 1, whose ends lie where `torch.linspace` puts them: in
    float32, counted from the nearer end, each product and sum rounded as one."""
    import numpy as np

    low, high = np.float32(0.1), np.float32(1)
    width = np.float64((high - low) / np.float32(steps))
    place = np.arange(steps + 1)
    from_low, from_high = np.float64(low) + width * place, high - width * (steps - place)
    ends = np.where(place < (steps + 1) // 2, from_low, from_high).astype(np.float32)
    middles: Array = (ends[:-1] + ends[1:]) / np.float32(2)
    return middles


@functools.cache
def _code_of_bin() -> Array:
    """The code of each bin: that of the level nearest to the bin's middle, the lower at a tie."""
    import numpy as np

    place = np.arange(_BINS, dtype=np.float32)
    value = np.float32(-1) + np.float32(2) * place / np.float32(_BINS - 1)
    return np.searchsorted(_midpoints(scale_levels()), value, side="left").astype(np.uint8)


@functools.cache
def _levels() -> Array:
    import numpy as np

    return np.array(LEVELS, np.float32)


def _midpoints(levels: Array) -> Array:
    import numpy as np

    midpoints: Array = (levels[:-1] + levels[1:]) / np.float32(2)
    return midpoints


def _scales(W_N: Array) -> Array:
    import numpy as np

    parts = [np.abs(_in_blocks(W_N[v], BLOCK)).max(axis=1) for v, _ in _block_chunks(len(W_N))]
    return np.concatenate(parts)


def _codes(W_N: Array, scale_G: Array) -> Array:
    """The codes (G, S) of whole blocks, or of the last of a weight, which is filled with zeros."""
    import numpy as np

    W_GS = _in_blocks(W_N, BLOCK)
    scaled_GS = W_GS * _inverse(scale_G)[:, None]
    if len(W_N) % BLOCK:
        scaled_GS[-1] = W_GS[-1] / np.maximum(scale_G[-1], np.float32(_LEAST))
    codes_GS = np.zeros(scaled_GS.shape, np.uint8)
    for midpoint in _midpoints(_levels()):  # several times quicker than a search
        codes_GS += scaled_GS > midpoint
    return codes_GS


def _inverse(scale: Array) -> Array:
    import numpy as np

    inverse: Array = np.float32(1) / np.maximum(scale, np.float32(_LEAST))
    return inverse


def _in_blocks(values: Array, size: int) -> Array:
    """As float32 rows of `size`, the last filled up with zeros."""
    import numpy as np

    if len(values) % size == 0:
        return values.reshape(-1, size).astype(np.float32)
    filled = np.zeros(-(-len(values) // size) * size, np.float32)
    filled[: len(values)] = values
    return filled.reshape(-1, size)


def _block_chunks(values: int) -> Iterator[tuple[slice, slice]]:
    """Slices over the values of a flat weight, of whole blocks, and over their blocks."""
    blocks = max(1, chunks.CHUNK // BLOCK)
    for start in range(0, -(-values // BLOCK), blocks):
        yield slice(start * BLOCK, (start + blocks) * BLOCK), slice(start, start + blocks)
