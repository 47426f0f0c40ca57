"""Convert between stored numpy arrays and float32 tensors, in bounded memory.

In numpy bfloat16 is `ml_dtypes.bfloat16`, which torch does not accept; its bits pass as int16.

Shape legend: I input features, O output features, P rows of a block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

BLOCK_ELEMENTS = 1024 * 1024  # 4 MiB of float32


def float32(array: NDArray[Any]) -> torch.Tensor:
    """Return a float32 copy, contiguous and writable."""
    import torch

    copy = torch.empty(array.shape, dtype=torch.float32)
    return copy.copy_(as_tensor(array))


def float32_blocks(
    read: Callable[[], NDArray[Any]], transposed: bool = False
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield a stored weight as float32, by blocks of rows: (rows, block of shape (P, I)).

    Args:
        read: maps the stored tensor; called for each block, so that pages already read are freed.
        transposed: the tensor is stored (I, O).

    The next block overwrites the buffer of the previous one.
    """
    import torch

    out_features, in_features = _oriented(read(), transposed).shape
    rows = min(out_features, max(1, BLOCK_ELEMENTS // in_features))
    buffer_PI = torch.empty((rows, in_features), dtype=torch.float32)
    for start in range(0, out_features, rows):
        block = slice(start, min(start + rows, out_features))
        W_PI = buffer_PI[: block.stop - block.start]
        yield block, W_PI.copy_(as_tensor(_oriented(read(), transposed)[block]))


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float32; float64 stays."""
    import torch

    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rounded(tensor: torch.Tensor, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round a float32 tensor to nearest even, as a numpy array of `dtype`."""
    import torch

    if dtype.name == "bfloat16":
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(dtype)
    array: NDArray[Any] = tensor.numpy().astype(dtype)
    return array


def _oriented(W: NDArray[Any], transposed: bool) -> NDArray[Any]:
    return W.T if transposed else W


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a read-only tensor that shares the array's memory."""
    import numpy as np
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # mapped files are read-only
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def in_columns(values_K: torch.Tensor) -> torch.Tensor:
    """Return (K, 1) for (K,), and (K, M) as it is."""
    return values_K[:, None] if values_K.ndim == 1 else values_K
