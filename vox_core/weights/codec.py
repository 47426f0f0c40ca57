"""Quantisations by the numbers: what a weight is once it has been through one.

`CODECS` has a reference in numpy for every quantisation, the same on every machine. It says which
widths fit, and what is left of a weight (`round_trip`). Each gives bit for bit what the library
gives that backends quantise with, on the CPU:

    nf4, nf4-single                  nf4.py          bitsandbytes
    int8                             int8.py         bitsandbytes, from float32
    affine4, affine8, mxfp4, nvfp4   mlx_formats.py  MLX

Shape legend: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from vox_core.contract import Quant
from vox_core.weights.int8 import Int8
from vox_core.weights.mlx_formats import MLX_FORMATS
from vox_core.weights.nf4 import Nf4

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]


class Codec(Protocol):
    """What is known of a quantisation by its numbers alone."""

    def fault(self, in_features: int) -> str | None:
        """Why a module of this width cannot be quantised so; None if it can."""
        ...

    def round_trip(self, W_OI: Array, dtype: np.dtype[Any] | None = None) -> Array:
        """The weight that is left after quantising `W_OI` in its own dtype and dequantising it.

        Args:
            dtype: what is computed with, and the result's; without it that of `W_OI`.
        """
        ...


CODECS: Mapping[Quant, Codec] = {
    "nf4": Nf4(double=True),
    "nf4-single": Nf4(double=False),
    "int8": Int8(),
    **MLX_FORMATS,
}
"""Every format; `nf4-embeddings` is made of two (`vox_core.adapter.targets.format_of`)."""
