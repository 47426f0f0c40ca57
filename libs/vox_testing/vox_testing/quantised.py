"""Round-trip a weight through each named quantisation, in float64.

Independent of `vox_formats.quant.CODECS`, which backends may use; tests/conformance compares the
two.

    nf4-single
              16 levels of a normal distribution, times the largest magnitude of 64 values in a row
              (Dettmers et al. 2023, arXiv:2305.14314, appendix E)
    nf4       the same, with those magnitudes packed once more: their mean, and for what each is
              away from it a float of 8 bits, times the largest of 256 (the same, section 3;
              Dettmers 2015, arXiv:1511.04561)
    int8      127 steps to either side, times the largest magnitude of an output row
              (Dettmers et al. 2022, arXiv:2208.07339, section 2)
    affine4   15 or 255 steps from one end of 64 values in a row to the other, the end of larger
    affine8   magnitude kept exactly: MLX's `quantize`
    mxfp4     0, 0.5, 1, 1.5, 2, 3, 4 and 6 to either side, times the least power of two that keeps
              32 values within (OCP Microscaling Formats 1.0, section 5.3; as MLX scales)
    nvfp4     the same levels, times a float8 (E4M3) for 16 values

A group is values next to one another in memory, along the input features. Whole weights were held
against those of bitsandbytes 0.50 (relative distance 3e-8 for nf4 and nf4-single; 2e-3 for int8,
which it makes from float16) and of MLX (affine 1e-7, mxfp4 and nvfp4 to the bit). The formats' own
error is 9e-2 to 1.2e-1 with four bits and 5e-3 with eight.

Shape legend: O output features, I input features, G groups, S values of a group, 64 where it says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vox_core.weights import numpy_dtype
from vox_testing.llama import Doubles

if TYPE_CHECKING:
    from vox_core.contract import Quant

GROUP, SCALE_GROUP = 64, 256
MX_GROUP, NV_GROUP = 32, 16
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The quantiles of the paper, as bitsandbytes has them: float32, from -1 to 1."""
DYNAMIC = np.array(
    [
        0.0,
        1.0,
        *(
            sign * 10.0**power * (0.1 + 0.9 * (step + 0.5) / 2 ** (power + 6))
            for power in range(-6, 1)
            for step in range(2 ** (power + 6))
            for sign in (-1, 1)
        ),
    ]
)
"""Floats of 8 bits: a power of ten, and as many bits for the fraction as it leaves."""
E2M1 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Every value of a float of four bits."""


def round_trip(quant: Quant, weight_OI: Doubles) -> Doubles:
    """Quantise and dequantise `weight_OI`; the input features are a multiple of 64."""
    return _FORMATS[quant](weight_OI)


def _nf4_single(weight_OI: Doubles) -> Doubles:
    return _levelled(weight_OI, GROUP, NF4, lambda largest_G1: largest_G1)


def _nf4(weight_OI: Doubles) -> Doubles:
    largest_G1 = np.abs(weight_OI.reshape(-1, GROUP)).max(1, keepdims=True)
    taken_G64 = _nf4_single(weight_OI).reshape(-1, GROUP) / _not_zero(largest_G1)
    found: Doubles = (taken_G64 * _packed(largest_G1)).reshape(weight_OI.shape)
    return found


def _packed(scale_G1: Doubles) -> Doubles:
    """Pack scales again; 8-bit floats are looked up as bitsandbytes does on the CPU, by the middle
    of one of 65536 bins."""
    mean = scale_G1.mean()
    found = []
    for some_S1 in np.split(scale_G1 - mean, range(SCALE_GROUP, len(scale_G1), SCALE_GROUP)):
        largest = np.abs(some_S1).max()
        middle_S1 = np.round((some_S1 / _not_zero(largest) + 1) / 2 * 65535) / 65535 * 2 - 1
        nearest_S = np.abs(middle_S1 - DYNAMIC).argmin(1)
        found.append(DYNAMIC[nearest_S, None] * largest + mean)
    return np.concatenate(found)


def _mxfp4(weight_OI: Doubles) -> Doubles:
    def scale(largest_G1: Doubles) -> Doubles:
        return np.exp2(np.ceil(np.log2(largest_G1 / E2M1[-1])))

    return _levelled(weight_OI, MX_GROUP, E2M1, scale)


def _nvfp4(weight_OI: Doubles) -> Doubles:
    def scale(largest_G1: Doubles) -> Doubles:
        return (largest_G1 / E2M1[-1]).astype(numpy_dtype("F8_E4M3")).astype(np.float64)

    return _levelled(weight_OI, NV_GROUP, E2M1, scale)


def _levelled(
    weight_OI: Doubles, size: int, levels: Sequence[float], scale: Callable[[Doubles], Doubles]
) -> Doubles:
    """Round each value to the nearest level times the scale of its group's largest magnitude."""
    values_GS = weight_OI.reshape(-1, size)
    scale_G1 = scale(_not_zero(np.abs(values_GS).max(1, keepdims=True)))
    nearest_GS = np.abs((values_GS / scale_G1)[..., None] - np.array(levels)).argmin(-1)
    found: Doubles = (np.array(levels)[nearest_GS] * scale_G1).reshape(weight_OI.shape)
    return found


def _int8(weight_OI: Doubles) -> Doubles:
    step_O1 = _not_zero(np.abs(weight_OI).max(1, keepdims=True)) / 127
    found: Doubles = np.round(weight_OI / step_O1) * step_O1
    return found


def _affine(steps: int) -> Callable[[Doubles], Doubles]:
    def affine(weight_OI: Doubles) -> Doubles:
        values_G64 = weight_OI.reshape(-1, GROUP)
        low_G1 = values_G64.min(1, keepdims=True)
        high_G1 = values_G64.max(1, keepdims=True)
        downwards_G1 = np.abs(low_G1) <= np.abs(high_G1)
        edge_G1 = np.where(downwards_G1, high_G1, low_G1)
        step_G1 = _not_zero(high_G1 - low_G1) / steps * np.where(downwards_G1, -1, 1)
        # Zero is a level, too: the edge is a whole number of steps from it.
        whole_G1 = np.round(edge_G1 / step_G1)
        step_G1 = np.where(whole_G1 == 0, step_G1, edge_G1 / _not_zero(whole_G1))
        edge_G1 = np.where(whole_G1 == 0, 0.0, edge_G1)
        taken_G64 = np.clip(np.round((values_G64 - edge_G1) / step_G1), 0, steps)
        found: Doubles = (taken_G64 * step_G1 + edge_G1).reshape(weight_OI.shape)
        return found

    return affine


def _not_zero(values: Doubles) -> Doubles:
    return np.where(values == 0, 1.0, values)


_FORMATS: dict[Quant, Callable[[Doubles], Doubles]] = {
    "nf4": _nf4,
    "nf4-single": _nf4_single,
    "int8": _int8,
    "affine4": _affine(15),
    "affine8": _affine(255),
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}
