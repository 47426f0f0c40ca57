"""Plain Hugging Face checkpoints: shards, index, configuration and companions, written here.

What is written comes tensor by tensor from `Weights`, changed by the caller on the way or not.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_core import bounded_json, files
from vox_core.contract import DType
from vox_core.data.tokenizer import GENERATION_CONFIG
from vox_core.digests import TOKENIZER_FILES
from vox_core.weights import (
    INDEX,
    STORED_AS,
    WEIGHTS,
    TensorInfo,
    WeightFolder,
    Weights,
    numpy_dtype,
    write_safetensors,
)
from vox_core.weights.quantised import plain_config

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tensors: TypeAlias = "Iterator[tuple[str, NDArray[Any]]]"

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "LICENCE*", "NOTICE*")
_NOT_COPIED = {"vox_adapter.json", "vox_merge.json"}


def write_checkpoint(
    folder: Path, weights: Weights, tensors: Callable[[list[str]], Tensors] | None = None
) -> None:
    """Write the shards and the index of `weights`, and copy everything small beside them.

    Args:
        tensors: names of a shard's tensors -> each with its values; by default `weights.read`.

    Raises:
        ValueError: `tensors` gives other names, dtypes or shapes than `weights`.
    """
    for file in weights.files:
        names = [name for name in weights.tensors if weights.where[name] == file]
        specs = {n: (weights.tensors[n].dtype, weights.tensors[n].shape) for n in names}
        values = tensors(names) if tensors else ((name, weights.read(name)) for name in names)
        write_safetensors(folder / file, specs, values)
    if weights.files != (WEIGHTS,):
        count = sum(math.prod(info.shape) for info in weights.tensors.values())
        sizes = {"total_parameters": count, "total_size": weights.nbytes}
        files.write_json(folder / INDEX, {"metadata": sizes, "weight_map": dict(weights.where)})
    for pattern in _COPIED:  # configuration, tokenizer, chat template and licence
        for path in weights.folder.glob(pattern):
            if path.name not in _NOT_COPIED and not path.name.endswith(".index.json"):
                files.write_bytes(folder / path.name, path.read_bytes())
    if (folder / "config.json").is_file():
        config = bounded_json.read(folder / "config.json")
        if (plain := plain_config(config)) != config:
            files.write_json(folder / "config.json", plain)


def as_stored(weights: Weights, dtype: DType | None) -> Weights:
    """Return `weights` with floating-point tensors rounded to `dtype`; None keeps their own."""

    def stored(info: TensorInfo) -> TensorInfo:
        if dtype is None or info.dtype not in STORED_AS.values():
            return info
        return replace(info, dtype=STORED_AS[dtype])

    tensors = {name: stored(info) for name, info in weights.tensors.items()}

    def read(name: str) -> NDArray[Any]:
        return weights.read(name).astype(numpy_dtype(tensors[name].dtype), copy=False)

    return Weights(weights.folder, tensors, weights.where, read)


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
        write_checkpoint(copy, weights)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)
