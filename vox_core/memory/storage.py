"""Bytes of the base's weights on the device, plain and quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vox_core.contract import DType, Quant
from vox_core.memory.architecture import Architecture
from vox_formats.quant import MLX_FORMATS

BYTES: Mapping[DType, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number."""

# Bytes a weight, given its row's width and the bytes of a number in the compute dtype.
_PER_WEIGHT: Mapping[Quant, Callable[[int, int], float]] = {
    # Four bits; a byte for the scale of 64 weights; a float32 for the scale of 256 such bytes
    # (Dettmers et al., arXiv:2305.14314, section 3).
    "nf4": lambda width, number: 0.5 + 1 / 64 + 4 / (64 * 256),
    # The same with a float32 for each scale.
    "nf4-single": lambda width, number: 0.5 + 4 / 64,
    # A byte, and a float32 a row (Dettmers et al., arXiv:2208.07339, section 2).
    "int8": lambda width, number: 1 + 4 / width,
    # A scale and a bias a group, in the weight's own dtype (vox_core/weights/codec.py).
    "affine4": lambda width, number: 0.5 + 2 * number / MLX_FORMATS["affine4"].group_size,
    "affine8": lambda width, number: 1 + 2 * number / MLX_FORMATS["affine8"].group_size,
    # A byte a group (vox_core/weights/codec.py).
    "mxfp4": lambda width, number: 0.5 + 1 / MLX_FORMATS["mxfp4"].group_size,
    "nvfp4": lambda width, number: 0.5 + 1 / MLX_FORMATS["nvfp4"].group_size,
}


def bytes_per_weight(quant: Quant, width: int, dtype: DType) -> float:
    """Of a weight in a row of `width`, with its share of what lies beside the codes."""
    number = BYTES[dtype]
    return _PER_WEIGHT[quant](width, number) if quant in _PER_WEIGHT else float(number)


def weight_bytes(model: Architecture, quant: Quant, dtype: DType) -> int:
    """All of the base: what `quant` reaches quantised, the rest in the compute dtype."""
    total = 0.0
    for tensor, elements in model.elements.items():
        packed = model.packed(tensor, quant)
        total += elements * (bytes_per_weight(*packed, dtype) if packed else BYTES[dtype])
    return round(total)


def largest_weight(model: Architecture) -> int:
    """Elements of the largest weight that a quantisation reaches."""
    return max((model.elements[tensor] for tensor in model.widths), default=0)


def dequantising(quant: Quant, dtype: DType) -> float:
    """Bytes a weight while it is dequantised, in vox_torch/quantised.py: INT8's codes and their
    product with the scale are float32; NF4's scales are, one in 64."""
    return 8.0 if quant == "int8" else BYTES[dtype] + 4 / 64
