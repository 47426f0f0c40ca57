"""INT8 by rows: 127 steps to either side of zero, one scale an output feature.

After Dettmers et al. 2022, arXiv:2208.07339, section 2, the weights' part of it. In float32, each
operation rounded by itself, from the weight as it is stored:

    scale_O = max(max_I |W_OI|, 1e-36)
    q_OI    = round_half_even(W_OI * ((1 / scale_O) * 127))       int8, -127 to 127
    step_O  = scale_O / 127
    W'_OI   = q_OI * step_O                                       rounded once, to the dtype

The codes are bit for bit those that bitsandbytes 0.50 computes on the CPU of a weight in float32
(tests/parity/test_bitsandbytes_formats.py). Its layers hand it float16, which rounds a weight in
float32 first (relative distance of what is left: 2e-3) and has not the range of bfloat16; that is
not followed here. The least scale keeps rows of zeros finite, and rows whose scale has an inverse
beyond float32; weights are never so small.

Activations stay as they are: what LLM.int8() does to them is no matter of weights.

Shape legend: O output features, I input features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_core.weights.chunks import row_chunks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

STEPS = 127
LEAST_SCALE = 1e-36


@dataclass(frozen=True, slots=True)
class Int8:
    """The format; it has no parameters, and takes every width."""

    def fault(self, in_features: int) -> str | None:
        return None

    def round_trip(self, W_OI: Array, dtype: np.dtype[Any] | None = None) -> Array:
        import numpy as np

        left_OI = np.empty(W_OI.shape, dtype or W_OI.dtype)
        for rows in row_chunks(W_OI.shape):
            left_OI[rows] = _round_trip(W_OI[rows].astype(np.float32))
        return left_OI


def _round_trip(W_OI: Array) -> Array:
    """In float32 throughout. The inverse is taken before it is multiplied: `127 / scale` in torch
    does so, and rounds twice."""
    import numpy as np

    steps = np.float32(STEPS)
    scale_O1 = np.maximum(np.abs(W_OI).max(axis=1, keepdims=True), np.float32(LEAST_SCALE))
    codes_OI = np.rint(W_OI * (np.float32(1) / scale_O1 * steps)).astype(np.int8)
    left_OI: Array = codes_OI * (scale_O1 / steps)
    return left_OI
