"""Open the weights of a model folder: one safetensors file, or shards with an index.

The index is checked against the folder: file names must stay inside it, shards must exist, and
tensors must be in the shards that it names. Pickles are never opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

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


@dataclass(frozen=True)
class Weights:
    """The tensors of a model, readable one by one, dequantised if stored quantised.

    Args:
        folder: where the files are.
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
    outside = {file for file in map(str, weight_map.values()) if not _is_plain_name(file)}
    if outside:
        raise _bad_index(path, [f"{file!r} is not the name of a file here" for file in outside])
    return weight_map


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and not set(name) & set("/\\\0")


def _open_shards(folder: Path, where: Mapping[str, str]) -> dict[str, SafetensorsFile]:
    shards: dict[str, SafetensorsFile] = {}
    corrupt: list[ModelError] = []
    faults: list[str] = []
    for file in sorted(set(where.values())):
        if not _is_there(folder / file):
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
