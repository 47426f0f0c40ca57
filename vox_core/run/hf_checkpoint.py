"""Plain Hugging Face checkpoints: shards, index, configuration and companions, written here.

What is written comes tensor by tensor from `Weights`, changed by the caller on the way or not.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_core import bounded_json, files
from vox_core.contract import DType
from vox_core.data.tokenizer import GENERATION_CONFIG
from vox_core.digests import TOKENIZER_FILES
from vox_core.weights import INDEX, Spec, WeightFolder, Weights, write_safetensors
from vox_core.weights.quantised import plain_config

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tensors: TypeAlias = "Iterator[tuple[str, NDArray[Any]]]"

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "LICENCE*", "NOTICE*")
_NOT_COPIED = {"vox_adapter.json", "vox_merge.json"}


def write_shards(
    folder: Path,
    weights: Weights,
    specs: Callable[[str], dict[str, Spec]],
    tensors: Callable[[list[str]], Tensors],
) -> None:
    """Write the files of `weights`, one after the other.

    Args:
        specs: what stands in the place of a tensor, by name.
        tensors: given the names of a file's tensors, everything that stands in their place.

    Raises:
        ValueError: `tensors` does not give what `specs` says.
    """
    for file in weights.files:
        names = [name for name in weights.tensors if weights.file_of(name) == file]
        expected = {key: spec for name in names for key, spec in specs(name).items()}
        write_safetensors(folder / file, expected, tensors(names))


def copy_companions(base: Path, folder: Path) -> None:
    """Configuration, tokenizer, chat template and licence: everything small that is not weights."""
    for pattern in _COPIED:
        for file in base.glob(pattern):
            if file.name not in _NOT_COPIED and not file.name.endswith(".index.json"):
                files.write_bytes(folder / file.name, file.read_bytes())
    if (folder / "config.json").is_file():
        config = bounded_json.read(folder / "config.json")
        if (plain := plain_config(config)) != config:
            files.write_json(folder / "config.json", plain)


def copy_tokenizer(templated: Path | None, folder: Path) -> None:
    """The tokenizer with the chat template that an adapter was trained with, over the base's own;
    and the token that ends its turns, among those that end an answer."""
    for name in (*TOKENIZER_FILES, GENERATION_CONFIG) if templated else ():
        if templated and (file := templated / name).is_file():
            files.write_bytes(folder / name, file.read_bytes())


def declare_dtype(path: Path, dtype: DType) -> None:
    """Let the configuration say what the weights are stored in, where it says anything."""
    config = bounded_json.read(path)
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    said = {key: names[dtype] for key in ("dtype", "torch_dtype") if key in config}
    files.write_json(path, {**config, **(said or {"dtype": names[dtype]})})


@contextmanager
def plain_copy(weights: Weights, beside: Path) -> Iterator[Path]:
    """A plain folder with these weights, for as long as the block lasts.

    A backend without the quantisation computes with them like this. The copy is made on the disk of
    `beside`, which is where there is room; weights that are plain already need none.
    """
    if isinstance(weights, WeightFolder):
        yield weights.folder
        return
    copy = Path(tempfile.mkdtemp(prefix=files.TEMPORARY_PREFIX, dir=beside.absolute().parent))
    try:
        write_shards(copy, weights, lambda name: {name: spec_of(weights, name)}, reader(weights))
        if weights.index is not None:
            files.write_json(copy / INDEX, weights.index)
        copy_companions(weights.folder, copy)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def copy_bytes(weights: Weights) -> int:
    """What the weights of a plain copy take on the disk; nothing where none is made."""
    if isinstance(weights, WeightFolder):
        return 0
    return sum(info.nbytes for info in weights.tensors.values())


def spec_of(weights: Weights, name: str) -> Spec:
    """The tensor's own dtype and shape."""
    return weights.tensors[name].dtype, weights.tensors[name].shape


def reader(weights: Weights) -> Callable[[list[str]], Tensors]:
    """The tensors as they are, for `write_shards`."""
    return lambda names: ((name, weights.read(name)) for name in names)
