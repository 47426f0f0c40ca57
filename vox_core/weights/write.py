"""Writing a safetensors file from tensors that come one by one."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_core import files
from vox_core.weights.file import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

Spec: TypeAlias = tuple[str, tuple[int, ...]]
"""What a tensor will be: its dtype by safetensors' name, and its shape."""


def write_safetensors(
    path: Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Array]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` to `path`, atomically, holding one at a time.

    Args:
        specs: what will come, in the order in which it will come; the header is made from it.
        tensors: (name, array) in that order, of exactly those dtypes and shapes.
        metadata: the file's `__metadata__`; without it `{"format": "pt"}`, which transformers
            asks of a checkpoint.

    Raises:
        ValueError: a tensor is missing, surplus, out of order, or not what its spec says.
        StorageError: the file cannot be written.
    """
    with files.atomic_file(path) as file:
        for part in safetensors_bytes(specs, tensors, metadata):
            file.write(part)


def safetensors_bytes(
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Array]],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """The bytes of such a file, part by part; arguments and errors as in `write_safetensors`."""
    header = _header_bytes(specs, {"format": "pt"} if metadata is None else metadata)
    yield struct.pack("<Q", len(header)) + header
    for array in _matching(specs, tensors):
        yield _raw(array)


def _header_bytes(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> bytes:
    """The header, padded with spaces so that the data begins at a multiple of eight."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, (dtype, shape) in specs.items():
        end = begin + math.prod(shape) * numpy_dtype(dtype).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return raw + b" " * (-len(raw) % 8)


def _matching(specs: Mapping[str, Spec], tensors: Iterable[tuple[str, Array]]) -> Iterator[Array]:
    """The arrays, each held against the spec whose turn it is."""
    expected = iter(specs.items())
    for name, array in tensors:
        wanted, (dtype, shape) = next(expected, ("no more tensors", ("", ())))
        if name != wanted or array.shape != shape or array.dtype != numpy_dtype(dtype):
            raise ValueError(
                f"found {name} {array.dtype} {array.shape}, expected {wanted} {dtype} {shape}"
            )
        yield array
    if (missing := next(expected, None)) is not None:
        raise ValueError(f"found the end, expected {missing[0]}")


def _raw(array: Array) -> memoryview:
    import numpy as np

    # As bytes, because the buffer protocol has no code for bfloat16.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
