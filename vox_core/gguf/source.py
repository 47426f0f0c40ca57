"""A GGUF file, read with the `gguf` package.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package believes every
length that a file states: past the end of the file it reads nothing, over and over. Here a length
that leads outside the file is an error, and so is everything else that the package trips over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vox_core import files
from vox_core.errors import ModelError

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

_CHUNK = 16 << 20
"""Elements dequantised at a time: 64 MB of float32."""


class Stored(NamedTuple):
    """Where a tensor lies and how: `shape` and `dtype` are its blocks', not its values'."""

    kind: gguf.GGMLQuantizationType
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class GgufSource:
    """The metadata and the tensors of one file.

    Attributes:
        tensors: name -> shape, outermost dimension first.

    Raises:
        ModelError: M008, the file is not one that can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.storage_errors(path), _readable(path):
            reader = _bounded_reader(path)
            # The reader keeps an array for each number in the file; what it says is far smaller.
            self._metadata = {key: _value(field) for key, field in reader.fields.items()}
        self.tensors: dict[str, tuple[int, ...]] = {
            tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors
        }
        self._stored = {
            tensor.name: Stored(
                tensor.tensor_type, tensor.data_offset, tensor.data.shape, tensor.data.dtype
            )
            for tensor in reader.tensors
        }

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key: a number, a text, a bool or a list of one of them."""
        return self._metadata.get(key, default)

    def read(self, name: str, offset: float = 0.0) -> Array:
        """The tensor in bfloat16, after `offset` was added to it in float32."""
        import ml_dtypes
        import numpy as np
        from gguf.quants import dequantize

        out = np.empty(self.tensors[name], ml_dtypes.bfloat16)
        stored = self._stored[name]
        # A mapping for this tensor alone, so that the pages go when it is done.
        blocks: np.memmap[Any, Any] = np.memmap(
            self.path, dtype=stored.dtype, mode="r", offset=stored.offset, shape=stored.shape
        )
        for rows in _chunks(out.shape):
            out[rows] = dequantize(blocks[rows], stored.kind) + np.float32(offset)
        return out

    def unreadable(self) -> list[str]:
        """Each tensor of a type that the `gguf` package cannot dequantise, as a fault."""
        kinds = {stored.kind for stored in self._stored.values()}
        refused = {kind for kind in kinds if not _can_dequantize(kind)}
        return [
            f"tensor {name}: its type {stored.kind.name} cannot be dequantised"
            for name, stored in self._stored.items()
            if stored.kind in refused
        ]


def _bounded_reader(path: Path) -> gguf.GGUFReader:
    import numpy as np
    from gguf import GGUFReader

    class Bounded(GGUFReader):
        """A reader that stops at the end of the file."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"the file ends before what should be at byte {offset}")
            return super()._get(offset, dtype, count, override_order)

    return Bounded(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Map whatever the package trips over to a `ModelError`."""
    try:
        yield
    except (ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise unconvertible(
            path,
            found=f"{type(error).__name__}: {error}",
            expected="a whole GGUF file of version 2 or 3",
            remedy="copy or download the file again",
        ) from error


def _value(field: gguf.ReaderField) -> Any:
    import numpy as np
    from gguf import GGUFValueType

    value = field.contents()
    # 1e-5 was written as the nearest float32; 1e-5 is what was meant.
    return float(str(np.float32(value))) if field.types == [GGUFValueType.FLOAT32] else value


def _can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    one_block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        dequantize(one_block, kind)
    except NotImplementedError:
        return False
    return True


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the outermost dimension, each of about `_CHUNK` elements."""
    step = max(1, _CHUNK // max(1, math.prod(shape[1:])))
    return (slice(start, start + step) for start in range(0, shape[0], step))


def unconvertible(
    path: Path,
    *,
    remedy: str,
    found: str | None = None,
    expected: str | None = None,
    faults: list[str] | None = None,
) -> ModelError:
    """The error of a GGUF file that vox does not convert."""
    return ModelError(
        "M008",
        "the GGUF file cannot be converted",
        where=path,
        found=found,
        expected=expected,
        faults=faults or (),
        remedy=remedy,
    )
