"""Read a safetensors file after checking it, or write one atomically.

The `safetensors` library checks the header against itself and against the size of the file
(https://github.com/huggingface/safetensors#format). It reads into memory of its own, so vox maps
tensors itself: one at a time, and the array owns the mapping. `write_safetensors` takes tensors one
by one. So a file of any size needs the memory of one tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_core import bounded_json, files
from vox_core.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

MAX_AXES = 32
MAX_ELEMENTS = 1 << 60
_PREFIX = struct.Struct("<Q")
"""The length of the header, with which a file begins."""

# Names of safetensors -> names of numpy and ml_dtypes. Sub-byte types (F4, F6) have no numpy type.
_NUMPY = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "bfloat16",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a safetensors dtype name: `BF16` -> `ml_dtypes.bfloat16`."""
    import ml_dtypes  # noqa: F401  (registers its types with numpy)
    import numpy as np

    return np.dtype(_NUMPY[name])


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in a file, in bytes."""
    return math.prod(shape) * numpy_dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its dtype by safetensors' name, its shape, and where a file's data has it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.dtype, self.shape)


class SafetensorsFile:
    """A safetensors file whose header has been checked.

    Attributes:
        tensors: name -> dtype, shape and offset, in the order of the file.

    Raises:
        ModelError: M003.
        StorageError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, self._data = _read_header(path)
        header.pop("__metadata__", None)
        infos = {
            name: TensorInfo(entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][0])
            for name, entry in header.items()
        }
        faults = [f"tensor {n}: {fault}" for n, info in infos.items() if (fault := _fault(info))]
        if faults:
            raise _corrupt(path, faults=faults)
        # Tensors without elements share an offset with the next one.
        order = sorted(infos.items(), key=lambda item: (item[1].begin, item[1].nbytes))
        self.tensors: Mapping[str, TensorInfo] = dict(order)

    def read(self, name: str) -> Array:
        """Return the tensor, memory-mapped and read-only. Raises KeyError for an unknown name."""
        import numpy as np

        info = self.tensors[name]
        dtype = numpy_dtype(info.dtype)
        if info.nbytes == 0:
            return np.empty(info.shape, dtype)
        # One mapping per tensor: its pages are freed with the array.
        with files.storage_errors(self.path):
            mapped = np.memmap(
                self.path, dtype=dtype, mode="r", offset=self._data + info.begin, shape=info.shape
            )
        return np.asarray(mapped)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the checked header and the offset of the data."""
    from safetensors import SafetensorError, safe_open

    with files.storage_errors(path), path.open("rb") as file:
        try:
            with safe_open(path, framework="numpy"):
                pass
            (length,) = _PREFIX.unpack(file.read(_PREFIX.size))
            return bounded_json.parse(file.read(length), unique=True), _PREFIX.size + length
        except (SafetensorError, bounded_json.JsonFault) as error:
            raise _corrupt(path, found=str(error)) from error


def _fault(info: TensorInfo) -> str | None:
    """Return why numpy cannot hold a tensor that the library accepts."""
    if info.dtype not in _NUMPY:
        return f"found dtype {info.dtype}, expected one of {', '.join(_NUMPY)}"
    if len(info.shape) > MAX_AXES or math.prod(filter(None, info.shape)) > MAX_ELEMENTS:
        shape = f"{list(info.shape[:MAX_AXES])!r:.120}"
        return f"found axes {shape}, expected at most {MAX_AXES}, and at most 2**60 elements"
    return None


def _corrupt(path: Path, *, found: str | None = None, faults: Iterable[str] = ()) -> ModelError:
    return ModelError(
        "M003",
        "a safetensors file is corrupt or truncated",
        where=path,
        found=found,
        expected="a whole safetensors file",
        faults=tuple(faults),
        remedy="copy or download this file again; it may not have been transferred whole",
    )


# --- writing --------------------------------------------------------------------------------------

Spec: TypeAlias = tuple[str, tuple[int, ...]]
"""What a tensor will be: its dtype by safetensors' name, and its shape."""


def write_safetensors(
    path: Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Array]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` to `path` atomically, holding one tensor at a time.

    Args:
        specs: names, dtypes and shapes of the tensors in order, for the header.
        tensors: (name, array) in that order, of exactly those dtypes and shapes.
        metadata: the file's `__metadata__`; by default `{"format": "pt"}`, which transformers
            requires.

    Raises:
        ValueError: a tensor is missing, surplus, out of order, or differs from its spec.
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
    """Yield the bytes of a safetensors file in parts; arguments and errors as for
    `write_safetensors`."""
    header = _header_bytes(specs, {"format": "pt"} if metadata is None else metadata)
    yield _PREFIX.pack(len(header)) + header
    for array in _matching(specs, tensors):
        yield _raw(array)


def _header_bytes(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> bytes:
    """Return the header, padded with spaces so that the data starts at a multiple of eight."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, (dtype, shape) in specs.items():
        end = begin + stored_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return raw + b" " * (-len(raw) % 8)


def _matching(specs: Mapping[str, Spec], tensors: Iterable[tuple[str, Array]]) -> Iterator[Array]:
    """Yield the arrays, each checked against its spec."""
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
