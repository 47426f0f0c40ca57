"""Between numpy arrays as files have them and MLX arrays.

bfloat16 comes and goes as `ml_dtypes.bfloat16`, which MLX does not take; its bits pass as uint16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray


def from_numpy(array: NDArray[Any]) -> mx.array:
    """An MLX array of the same values and dtype."""
    import mlx.core as mx
    import numpy as np

    if array.dtype.name == "bfloat16":
        return mx.array(np.ascontiguousarray(array).view(np.uint16)).view(mx.bfloat16)
    return mx.array(np.ascontiguousarray(array))


def float32(array: NDArray[Any]) -> mx.array:
    """The values in float32."""
    import mlx.core as mx

    return from_numpy(array).astype(mx.float32)


def rounded(array: mx.array, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Float32 values, rounded to nearest even, as a numpy array of `dtype`."""
    import mlx.core as mx
    import numpy as np

    if dtype.name == "bfloat16":
        return np.array(array.astype(mx.bfloat16).view(mx.uint16)).view(dtype)
    return np.array(array).astype(dtype)
