"""Open the weights of a model folder: one safetensors file, or shards with an index.

The index is checked against the folder: file names must stay inside it, shards must exist, and
tensors must be in the shards that it names. Pickles are never opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from vox_core import bounded_json, files
from vox_core.contract import Quant
from vox_core.errors import ModelError
from vox_core.weights.file import SafetensorsFile, TensorInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


class Weights(Protocol):
    """The tensors of a model, readable one by one, dequantised if stored quantised.

    Attributes:
        folder: where the files are.
        files: file names of a dequantised copy.
        tensors: every tensor of the model, file after file.
        index: the index of such a copy; None for a single file.
        quant: quantisation of the stored tensors.
        quantised: names of the quantised tensors.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def files(self) -> tuple[str, ...]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def index(self) -> Mapping[str, Any] | None: ...

    @property
    def quant(self) -> Quant: ...

    @property
    def quantised(self) -> frozenset[str]: ...

    def file_of(self, name: str) -> str:
        """Return the file that holds the tensor, or would in a dequantised copy."""
        ...

    def read(self, name: str) -> Array:
        """Return the tensor, read-only, in its dtype and shape."""
        ...


class WeightFolder:
    """The weights of a folder: `model.safetensors`, or the shards of an index.

    Attributes:
        files: names of the weight files, sorted.
        tensors: every tensor of the model, file after file, in the order of the data.
        index: the index as parsed, or None for a single file.

    Raises:
        ModelError: M005 without safetensors; M002 for a faulty index; M003 for a faulty file.
    """

    quant: Quant = "none"
    quantised: frozenset[str] = frozenset()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: Mapping[str, Any] | None = None
        if (folder / WEIGHTS).is_file():
            single = SafetensorsFile(folder / WEIGHTS)
            self._files = {WEIGHTS: single}
            self._file_of = dict.fromkeys(single.tensors, WEIGHTS)
        elif (folder / INDEX).is_file():
            self.index, self._file_of = _read_index(folder / INDEX)
            self._files = _open_shards(folder, self._file_of)
        else:
            raise _no_weights(folder)
        self.files: tuple[str, ...] = tuple(self._files)
        self.tensors: Mapping[str, TensorInfo] = {
            name: info
            for file, shard in self._files.items()
            for name, info in shard.tensors.items()
            if self._file_of.get(name) == file
        }

    def file_of(self, name: str) -> str:
        """Return the name of the file that holds the tensor."""
        return self._file_of[name]

    def read(self, name: str) -> Array:
        """Return the tensor, memory-mapped and read-only (`SafetensorsFile.read`)."""
        return self._files[self._file_of[name]].read(name)


def _read_index(path: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return the index and its `weight_map`, whose file names are checked to stay in the folder."""
    try:
        with files.storage_errors(path):
            index = bounded_json.read(path, unique=True)
    except bounded_json.JsonFault as error:
        raise _bad_index(path, [f"it is not JSON: {error}"]) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index(path, ["weight_map: expected an object that names a file for each tensor"])
    outside = {file for file in map(str, weight_map.values()) if not _is_plain_name(file)}
    if outside:
        raise _bad_index(path, [f"{file!r} is not the name of a file here" for file in outside])
    return index, weight_map


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and not set(name) & set("/\\\0")


def _open_shards(folder: Path, file_of: Mapping[str, str]) -> dict[str, SafetensorsFile]:
    shards: dict[str, SafetensorsFile] = {}
    corrupt: list[ModelError] = []
    faults: list[str] = []
    for file in sorted(set(file_of.values())):
        if not _is_there(folder / file):
            faults.append(f"shard {file}: it is not in the folder")
            continue
        try:
            shards[file] = SafetensorsFile(folder / file)
        except ModelError as error:
            corrupt.append(error)
    faults += [
        f"tensor {name}: it is not in {file}, where the index puts it"
        for name, file in file_of.items()
        if file in shards and name not in shards[file].tensors
    ]
    if corrupt:
        raise _corrupt_shards(folder, corrupt, faults)
    if faults:
        raise _bad_index(folder / INDEX, faults)
    return shards


def _corrupt_shards(
    folder: Path, corrupt: Sequence[ModelError], faults: Sequence[str]
) -> ModelError:
    """Return one error with every unreadable shard and every fault of the index."""
    if len(corrupt) == 1 and not faults:
        return corrupt[0]
    each = [
        f"{error.where}: {fault}"
        for error in corrupt
        for fault in error.faults or [f"found {error.found}, expected {error.expected}"]
    ]
    first = corrupt[0]
    return ModelError(
        "M003", first.what, where=folder, faults=[*each, *faults], remedy=first.remedy
    )


def _bad_index(path: Path, faults: Iterable[str]) -> ModelError:
    return ModelError(
        "M002",
        "the index of the weights does not fit the folder",
        where=path,
        faults=tuple(faults),
        remedy="download the whole model again, every shard that the index names",
    )


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


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # file name too long
        return False
