"""Plain Hugging Face checkpoints: shards, index, configuration and companions, written here.

What is written comes tensor by tensor from `Weights`, changed by the caller on the way or not.

`as_trained` shows the base as training saw it: each weight as its quantisation left it. A backend
quantises when it loads a model, from the weights as the files have them. Here the same is computed
by the references in `vox_formats.quant.CODECS`, so that any backend can merge onto those weights,
or be held against them, without knowing of the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vox_core import bounded_json, files
from vox_core.adapter.initial import initial_adapter
from vox_core.adapter.targets import format_of, quantised_modules
from vox_core.contract import AdapterState, DType, ExecutionPlan, Quant, TrainState
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
    plain_config,
    write_safetensors,
)
from vox_formats.quant import CODECS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.run.inputs import RunInputs
    from vox_core.run.reference import ModelReference


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
    with files.folder_beside(beside) as copy:
        write_checkpoint(copy, weights)
        yield copy


def trained_weights(source: ModelReference, *, exact: bool = True) -> Weights:
    """Return the weights that the adapter of `source` was trained on; see `as_trained`."""
    model_type = source.base.model_type
    return as_trained(source.weights, source.quant, model_type, source.trained_in, exact=exact)


def as_trained(
    weights: Weights, quant: Quant, model_type: str, dtype: DType | None, *, exact: bool = True
) -> Weights:
    """`weights` as a run sees them.

    Args:
        dtype: what the run computes in; None if that is not known.
        exact: show a quantised weight in a dtype that holds it; else in that of its file.
    """
    if weights.quant != "none" or quant == "none":
        return weights
    computed_in = numpy_dtype(STORED_AS[dtype]) if dtype else None
    modules = quantised_modules(weights.tensors, model_type, quant)
    packed = {m.tensor: (m.transposed, CODECS[format_of(p, quant)]) for p, m in modules.items()}

    def shown(name: str, info: TensorInfo) -> TensorInfo:
        own = numpy_dtype(info.dtype)
        holds = computed_in is None or np.promote_types(own, computed_in) == own
        return TensorInfo("F32", info.shape) if exact and name in packed and not holds else info

    tensors = {name: shown(name, info) for name, info in weights.tensors.items()}

    def read(name: str) -> NDArray[Any]:
        W = weights.read(name)
        if name not in packed:
            return W
        transposed, codec = packed[name]
        W = W.swapaxes(-1, -2) if transposed else W
        made = [codec.round_trip(W_OI, computed_in) for W_OI in W.reshape(-1, *W.shape[-2:])]
        left = made[0] if W.ndim == 2 else np.stack(made)  # experts
        stored = left.swapaxes(-1, -2) if transposed else left
        return stored.astype(numpy_dtype(tensors[name].dtype), copy=False)

    return Weights(weights.folder, tensors, weights.where, read)


def first_state(plan: ExecutionPlan, inputs: RunInputs) -> TrainState:
    """The state before the first step: with the starting adapter, or a seeded one."""
    start = inputs.start
    return TrainState(0, start.adapter if start else seeded(plan, inputs.weights))


def seeded(plan: ExecutionPlan, weights: Weights) -> AdapterState:
    """The adapter that a run begins with, if it does not start from another one.

    Args:
        weights: the base's, as its files have them. DoRA's magnitudes are the norms of what the
            backend makes of them.
    """
    contract = plan.contract
    seen = as_trained(weights, contract.quant, contract.model.model_type, plan.dtype)
    return initial_adapter(plan.modules, contract.adapter, contract.seed, seen.read, plan.saved)
