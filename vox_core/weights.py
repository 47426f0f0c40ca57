"""The weights of a model folder, dequantised if needed: read tensor by tensor, and written.

`open_weights` opens a folder: `model.safetensors`, or the shards of an index, whose file names must
stay inside the folder. Pickles are never opened. The `safetensors` library checks each header
against itself and against the size of the file (https://github.com/huggingface/safetensors#format).
It reads into memory of its own, so vox maps tensors itself: one at a time, and the array owns the
mapping. `write_safetensors` takes tensors one by one. So a file of any size needs the memory of one
tensor.

`mlx_lm.convert -q` writes `X.weight` as packed uint32, with `X.scales` and `X.biases` beside it,
and says in `config.json` how: `quantization` has the group size, bits and mode, and entries by
module for those that differ. `open_weights` shows each such tensor with the shape and the dtype it
has when dequantised, and dequantises it when it is read; mlx-lm's stack of experts as its experts.
Only families whose tensors mlx-lm otherwise stores with Hugging Face's names and layout are
supported. For others (moved axes, norms stored as 1 + w, other prefixes) the conversion would have
to be inverted. `vox_formats.quant` has the quantisations.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from vox_core import bounded_json, files
from vox_core.contract import DType, Quant
from vox_core.errors import ModelError
from vox_formats.mlx_model import STACKED, expert_names
from vox_formats.quant import FLOATS, MlxFormat, Packed, named_format, stored_fault

if TYPE_CHECKING:
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
STORED_AS: dict[DType, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""The name in safetensors files of a dtype of the contract."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a safetensors dtype name: `BF16` -> `ml_dtypes.bfloat16`."""
    import ml_dtypes  # noqa: F401  (registers its types with numpy)

    return np.dtype(_NUMPY[name])


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in a file, in bytes."""
    return math.prod(shape) * numpy_dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's dtype by safetensors' name, its shape, and its byte offset in a file."""

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
    what = "a safetensors file is corrupt or truncated"
    remedy = "copy or download this file again; it may not have been transferred whole"
    return ModelError("M003", what, where=path, found=found, faults=tuple(faults), remedy=remedy)


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
        # As bytes, because the buffer protocol has no code for bfloat16.
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


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


# --- folders --------------------------------------------------------------------------------------

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


@dataclass(frozen=True)
class Weights:
    """The tensors of a model, readable one by one, dequantised if stored quantised.

    Args:
        tensors: every tensor of the model, file after file; a `TensorInfo` has `shape`, `dtype` (as
            safetensors names it, such as `BF16`) and `nbytes`.
        where: tensor -> the file that holds it, or would in a dequantised copy.
        read: tensor -> its values, read-only.
        quant: quantisation of the stored tensors.
        quantised: names of the quantised tensors.
    """

    folder: Path
    tensors: Mapping[str, TensorInfo]
    where: Mapping[str, str]
    read: Callable[[str], Array]
    quant: Quant = "none"
    quantised: frozenset[str] = frozenset()

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the weight files, sorted."""
        return tuple(sorted(set(self.where.values())))

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())


class WeightFolder(Weights):
    """The weights of a folder as they are stored: `model.safetensors`, or the shards of an index.

    Raises:
        ModelError: M005 without safetensors; M002 for a faulty index; M003 for a faulty file.
    """

    def __init__(self, folder: Path) -> None:
        if (folder / WEIGHTS).is_file():
            single = SafetensorsFile(folder / WEIGHTS)
            opened, where = {WEIGHTS: single}, dict.fromkeys(single.tensors, WEIGHTS)
        elif (folder / INDEX).is_file():
            where = _read_index(folder / INDEX)
            opened = _open_shards(folder, where)
        else:
            raise _no_weights(folder)
        tensors = {
            name: info
            for file, shard in opened.items()
            for name, info in shard.tensors.items()
            if where.get(name) == file
        }
        # Tensors are memory-mapped (`SafetensorsFile.read`).
        super().__init__(folder, tensors, where, lambda name: opened[where[name]].read(name))


def _read_index(path: Path) -> dict[str, str]:
    """Return the `weight_map`, whose file names are checked to stay in the folder."""
    try:
        with files.storage_errors(path):
            index = bounded_json.read(path, unique=True)
    except bounded_json.JsonFault as error:
        raise _bad_index(path, [f"it is not JSON: {error}"]) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index(path, ["weight_map: expected an object that names a file for each tensor"])
    names = set(map(str, weight_map.values()))
    if outside := [n for n in names if not n.endswith(".safetensors") or set(n) & set("/\\\0")]:
        raise _bad_index(path, [f"{file!r} is not the name of a file here" for file in outside])
    return weight_map


def _open_shards(folder: Path, where: Mapping[str, str]) -> dict[str, SafetensorsFile]:
    shards: dict[str, SafetensorsFile] = {}
    corrupt: list[ModelError] = []
    faults: list[str] = []
    for file in sorted(set(where.values())):
        if not os.path.isfile(folder / file):  # noqa: PTH113 (Path's own raises for long names)
            faults.append(f"shard {file}: it is not in the folder")
            continue
        try:
            shards[file] = SafetensorsFile(folder / file)
        except ModelError as error:
            corrupt.append(error)
            faults += [f"{error.where}: {fault}" for fault in error.faults or (error.found,)]
    faults += [
        f"tensor {name}: it is not in {file}, where the index puts it"
        for name, file in where.items()
        if file in shards and name not in shards[file].tensors
    ]
    if corrupt:
        first = corrupt[0]
        raise ModelError("M003", first.what, where=folder, faults=faults, remedy=first.remedy)
    if faults:
        raise _bad_index(folder / INDEX, faults)
    return shards


def _bad_index(path: Path, faults: Iterable[str]) -> ModelError:
    what = "the index of the weights does not fit the folder"
    remedy = "download the whole model again, every shard that the index names"
    return ModelError("M002", what, where=path, faults=tuple(faults), remedy=remedy)


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    convert = (
        "vox never opens pickles, which can run code: convert them on a machine you trust with "
        "them, with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
    )
    return ModelError(
        "M005",
        "the model has no safetensors weights",
        where=folder,
        found=", ".join(pickles) or "no weights",
        expected=f"{WEIGHTS}, or {INDEX} and its shards",
        remedy=convert if pickles else "choose a folder that holds a model and its weights",
    )


# --- quantised by MLX -----------------------------------------------------------------------------

SAME_IN_MLX = frozenset({"gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Families whose tensors mlx-lm neither renames nor changes, and of which it computes what
transformers does (tests/parity/test_mlx_folders.py). The first gemma has another gelu there."""

FULL_PRECISION = "name the full-precision model, and quantise it with --quant affine4"
_KEY = "quantization"
_PARTS = (".scales", ".biases")


def open_weights(folder: Path) -> Weights:
    """Open the weights of a model folder, dequantised if MLX quantised them.

    Raises:
        ModelError: as `WeightFolder`; M002 for a quantised folder that cannot be read.
    """
    stored, config = WeightFolder(folder), bounded_json.read(folder / "config.json")
    if not isinstance(config.get(_KEY), dict):
        return stored
    model_type = str(config.get("model_type"))
    require_same_in_mlx(model_type, folder, SAME_IN_MLX | STACKED)
    return _dequantised(stored, config[_KEY], model_type)


def _dequantised(stored: Weights, said: Mapping[str, Any], model_type: str) -> Weights:
    formats, known = _formats(said, stored), named_format(said)
    parts = {name.removesuffix(".weight") + part for name in formats for part in _PARTS}
    # The scales of the fp4 formats lack the dtype; the unquantised tensors have it.
    usual = next((info.dtype for info in stored.tensors.values() if info.dtype in FLOATS), "BF16")

    def dequantised(name: str, info: TensorInfo) -> TensorInfo:
        if name not in formats:
            return info
        scales = stored.tensors[f"{name.removesuffix('.weight')}.scales"].dtype
        shape = (*info.shape[:-1], info.shape[-1] * 32 // formats[name].bits)
        return TensorInfo(scales if scales in FLOATS else usual, shape)

    tensors, source = dict[str, TensorInfo](), dict[str, tuple[str, int | slice]]()
    for name, info in ((n, dequantised(n, i)) for n, i in stored.tensors.items() if n not in parts):
        if name not in formats or len(info.shape) == 2:
            tensors[name], source[name] = info, (name, slice(None))
            continue
        for number, expert in enumerate(expert_names(name, info.shape[0], model_type)):
            tensors[expert] = replace(info, shape=info.shape[1:])
            source[expert] = name, number

    def read(shown: str) -> Array:
        name, at = source[shown]
        if name not in formats:
            return stored.read(name)
        path = name.removesuffix(".weight")
        biases = f"{path}.biases"
        packed = Packed(
            stored.read(name)[at],
            stored.read(f"{path}.scales")[at],
            stored.read(biases)[at] if biases in stored.tensors else None,
        )
        return formats[name].dequantise(packed, numpy_dtype(tensors[shown].dtype))

    where = {shown: stored.where[name] for shown, (name, _) in source.items()}
    quant = cast("Quant", known[0]) if known else "none"
    quantised = frozenset(shown for shown, (name, _) in source.items() if name in formats)
    return Weights(stored.folder, tensors, where, read, quant, quantised)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a dequantised copy, without MLX's keys."""
    if not isinstance(config.get(_KEY), dict):
        return dict(config)
    return {key: v for key, v in config.items() if key not in (_KEY, "quantization_config")}


def require_same_in_mlx(
    model_type: str, folder: Path, known: Collection[str] = SAME_IN_MLX
) -> None:
    """Refuse a family that mlx-lm stores in another layout (M002)."""
    if model_type in known:
        return
    raise ModelError(
        "M002",
        "weights of this family cannot be read or written in MLX's quantised format",
        where=folder,
        found=f"model_type {model_type}, which mlx-lm stores or computes otherwise",
        expected=f"one of {', '.join(sorted(known))}",
        remedy=FULL_PRECISION,
    )


def _formats(said: Mapping[str, Any], stored: Weights) -> dict[str, MlxFormat]:
    """Return tensor name -> format for every tensor with scales."""
    faults: list[str] = []
    found: dict[str, MlxFormat] = {}
    for path in (n.removesuffix(".scales") for n in stored.tensors if n.endswith(".scales")):
        own = said[path] if isinstance(said.get(path), dict) else said
        if (known := named_format(own)) is None:
            faults.append(f"{path}: found {_words(own)}")
        elif wrong := stored_fault(path, known[1], stored.tensors):
            faults.append(wrong)
        else:
            found[f"{path}.weight"] = known[1]
    packed = {name for name, info in stored.tensors.items() if info.dtype == "U32"}
    faults = faults or [
        f"{n}: it is packed, and has no scales" for n in sorted(packed - set(found))
    ]
    if faults or named_format(said) is None:
        raise ModelError(
            "M002",
            "the weights are quantised in a way that vox does not read",
            where=stored.folder,
            found=None if faults else _words(said),
            expected="MLX's affine with 4 or 8 bits, mxfp4 or nvfp4",
            faults=faults,
            remedy=FULL_PRECISION,
        )
    return found


def _words(said: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {said.get(key)}" for key in ("mode", "bits", "group_size"))
