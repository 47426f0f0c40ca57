"""Read a safetensors file with every header field checked, or write one atomically.

A file opens with eight bytes that give the length of a JSON header, then the header, then one
block of data that the tensors fill without gaps or overlaps
(https://github.com/huggingface/safetensors#format). `SafetensorsFile` reports all
faults of the header together, including disagreement with the size of the file.

Reading maps one tensor, and its array owns the mapping; `write_safetensors` takes tensors one by
one. So a file of any size needs the memory of one tensor.
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

MAX_HEADER = 100_000_000
MAX_AXES = 32
MAX_ELEMENTS = 1 << 60
_PREFIX = 8

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
    """One tensor of a file; `begin` and `end` are bytes from the start of the data block."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class SafetensorsFile:
    """A safetensors file whose header has been checked.

    Attributes:
        tensors: name -> offset, dtype and shape, in the order of the file.
        metadata: the file's own `__metadata__`.

    Raises:
        ModelError: M003, with every fault of the header.
        StorageError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.storage_errors(path):
            header, self._data = _read_header(path)
            room = path.stat().st_size - self._data
        faults: list[str] = []
        self.metadata = _metadata(header.pop("__metadata__", {}), faults)
        infos = {name: _info(name, entry, faults) for name, entry in header.items()}
        known = [(name, info) for name, info in infos.items() if info is not None]
        known.sort(key=lambda item: (item[1].begin, item[1].end))
        if len(known) == len(infos):
            faults += _layout_faults(known, room)
        if faults:
            raise _corrupt(path, faults=faults)
        self.tensors: Mapping[str, TensorInfo] = dict(known)

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
    """Return the parsed header and the offset of the data block."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_PREFIX)
        if len(prefix) < _PREFIX:
            raise _corrupt(path, found=f"{size} bytes", expected="a header length of 8 bytes")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER, size - _PREFIX):
            raise _corrupt(
                path,
                found=f"a header of {length} bytes in a file of {size}",
                expected=f"a header within the file, of at most {MAX_HEADER} bytes",
            )
        raw = file.read(length)
    try:
        header = bounded_json.parse(raw, unique=True)
    except bounded_json.JsonFault as error:
        raise _corrupt(path, found=f"a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _corrupt(path, found=type(header).__name__, expected="a JSON object as the header")
    return header, _PREFIX + length


def _metadata(value: object, faults: list[str]) -> Mapping[str, str]:
    if value is None:  # MLX writes this for a file without metadata
        return {}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    faults.append(f"__metadata__: found {value!r:.80}, expected an object of strings")
    return {}


def _info(name: str, entry: object, faults: list[str]) -> TensorInfo | None:
    """Parse an entry to a `TensorInfo`, or return None and a fault."""
    match entry:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [begin, end],
            **rest,
        } if not rest and all(_is_count(number) for number in (*shape, begin, end)):
            info = TensorInfo(dtype, tuple(shape), begin, end)
        case _:
            faults.append(
                f"tensor {name}: found {entry!r:.120}, "
                "expected dtype, shape and data_offsets [begin, end]"
            )
            return None
    if dtype not in _NUMPY:
        faults.append(f"tensor {name}: found dtype {dtype}, expected one of {', '.join(_NUMPY)}")
        return None
    if len(shape) > MAX_AXES or math.prod(filter(None, shape)) > MAX_ELEMENTS:
        faults.append(
            f"tensor {name}: found {len(shape)} axes {shape[:MAX_AXES]!r:.120}, expected at most "
            f"{MAX_AXES}, and at most 2**60 elements"
        )
        return None
    needed = stored_bytes(dtype, info.shape)
    if info.nbytes != needed:
        faults.append(
            f"tensor {name}: found {info.nbytes} bytes, "
            f"expected {needed} for {dtype} {list(info.shape)}"
        )
        return None
    return info


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _layout_faults(known: list[tuple[str, TensorInfo]], room: int) -> list[str]:
    """List gaps, overlaps and overruns of tensors, sorted by offset, in a block of `room` bytes."""
    faults, end, before = [], 0, "the start of the data"
    for name, info in known:
        if info.begin != end:
            what = "overlaps" if info.begin < end else "leaves a gap after"
            faults.append(
                f"tensor {name}: found begin {info.begin}, expected {end}: it {what} {before}"
            )
        end, before = max(end, info.end), f"tensor {name}"
    if end != room:
        short = "truncated" if room < end else "longer than its header says"
        faults.append(f"the data: found {room} bytes, expected {end}: the file is {short}")
    return faults


def _corrupt(
    path: Path, *, found: str | None = None, expected: str | None = None, faults: Iterable[str] = ()
) -> ModelError:
    return ModelError(
        "M003",
        "a safetensors file is corrupt or truncated",
        where=path,
        found=found,
        expected=expected,
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
    yield struct.pack("<Q", len(header)) + header
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
