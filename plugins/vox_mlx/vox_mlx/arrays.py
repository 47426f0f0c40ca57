"""Convert between numpy arrays as stored and MLX arrays.

In numpy bfloat16 is `ml_dtypes.bfloat16`, which MLX does not accept; its bits pass as uint16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    from numpy.typing import NDArray


def from_numpy(array: NDArray[Any]) -> mx.array:
    """Return an MLX array with the same values and dtype."""
    import mlx.core as mx
    import numpy as np

    if array.dtype.name == "bfloat16":
        return mx.array(np.ascontiguousarray(array).view(np.uint16)).view(mx.bfloat16)
    return mx.array(np.ascontiguousarray(array))


def float32(array: NDArray[Any]) -> mx.array:
    """Return the values in float32."""
    import mlx.core as mx

    return from_numpy(array).astype(mx.float32)


def rounded(array: mx.array, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round float32 values to nearest even, as a numpy array of `dtype`."""
    import mlx.core as mx
    import numpy as np

    if dtype.name == "bfloat16":
        return np.array(array.astype(mx.bfloat16).view(mx.uint16)).view(dtype)
    return np.array(array).astype(dtype)
