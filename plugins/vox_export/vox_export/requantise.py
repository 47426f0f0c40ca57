"""`vox merge --quant`: write a merged checkpoint with linear layers in MLX's quantised format.

Reads an unquantised checkpoint and writes a quantised one, file by file; embeddings, norms and the
output head stay unquantised, as in training with `--quant`. Where mlx-lm and transformers use
different keys, `config.json` has both. Afterwards every tensor is read back from disk and must
equal the quantisation of its source, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vox_core.api.files import read_json, write_json
from vox_core.api.models import (
    TensorInfo,
    WeightFolder,
    Weights,
    open_weights,
    positions,
    quantised_modules,
    require_same_in_mlx,
    write_checkpoint,
)
from vox_core.api.plans import find_experts
from vox_core.contract import Quant
from vox_core.errors import ModelError, PlanError, ProofError
from vox_export.child import transformers_config
from vox_formats import FormatError
from vox_formats.mlx_model import mlx_config, window
from vox_formats.quant import MLX_FORMATS, MlxFormat, Packed

if TYPE_CHECKING:
    from numpy.typing import NDArray


def require_quantisable(model: Path, name: str) -> None:
    """Refuse, before any work, a model that cannot be written in the format.

    Args:
        model: the base of the merged model.
        name: a key of `MLX_FORMATS`.

    Raises:
        ModelError: M002, MLX stores the family in another layout, mlx-lm does not support a
            setting of the model, or it has experts.
        PlanError: P001, modules do not fit the format.
    """
    config = read_json(model / "config.json")
    require_same_in_mlx(config["model_type"], model)
    tensors, quant, form = open_weights(model).tensors, cast("Quant", name), MLX_FORMATS[name]
    mlx_lm_config(config, model)
    reached = quantised_modules(tensors, config["model_type"], quant)
    faults = [
        f"{path}: {fault}"
        for path, module in reached.items()
        if (fault := form.fault(module.in_features))
    ]
    if faults:
        raise PlanError(
            "P001",
            "the merged model cannot be quantised so",
            where=f"--quant {name}",
            faults=faults,
            remedy="choose a quantisation with smaller groups, or leave out --quant",
        )


def mlx_lm_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration that transformers and mlx-lm both read, with the same meaning.

    Defaults of transformers are written out, because mlx-lm has others; a setting with two names is
    written under both.

    Args:
        folder: of the model, for errors.

    Raises:
        ModelError: M002, mlx-lm does not support a setting.
    """
    if experts := find_experts(config, {}):
        what = "a mixture of experts cannot be exported to mlx-lm"
        raise _refused(what, folder, experts, "`vox merge`, or `vox export --to peft`")
    written = {**_defaults(config, folder), **config}
    try:
        adapted = mlx_config(written)
    except FormatError as error:
        raise _refused(error.what, folder, error.found) from error
    if size := shorter_window(_window(written), written):
        raise _refused(
            "mlx-lm leaves out this model's sliding window, and would compute another model",
            folder,
            f"a window of {size} tokens, positions for {positions(written) or 'any number'}",
        )
    return adapted


def shorter_window(size: int | None, config: Mapping[str, Any]) -> int | None:
    """Return the window `size` if the model has more positions, else None."""
    longest = positions(config)
    return size if size is not None and (longest is None or size < longest) else None


def _defaults(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    read = transformers_config(config, folder).to_diff_dict()
    return {key: value for key, value in read.items() if value is not None}


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window of a layer that mlx-lm without vox would ignore."""
    if config["model_type"] == "mistral":  # only vox's backend applies its window
        size = config.get("sliding_window")
        return size if isinstance(size, int) else None
    return window(config)


def _refused(
    what: str,
    folder: Path,
    found: object,
    remedy: str = "`vox export --to gguf`, or `vox merge` without --quant",
) -> ModelError:
    return ModelError(
        "M002",
        what,
        where=folder / "config.json",
        found=found,
        expected="a model that `mlx_lm.load` computes as transformers does",
        remedy=remedy,
    )


def requantise(plain: Path, folder: Path, name: str) -> None:
    """Write the checkpoint `plain` quantised into `folder`, and verify it.

    Args:
        name: a key of `MLX_FORMATS`.

    Raises:
        ProofError: V001, a tensor on disk is not the quantisation of its source.
    """
    weights, form = WeightFolder(plain), MLX_FORMATS[name]
    config = read_json(plain / "config.json")
    reached = quantised_modules(weights.tensors, config["model_type"], cast("Quant", name))
    quantised = {module.tensor for module in reached.values()}
    write_checkpoint(folder, _quantised(weights, quantised, form))
    written = mlx_lm_config(read_json(folder / "config.json"), plain)
    write_json(folder / "config.json", {**written, "quantization": form.describe()})
    _require_written(open_weights(folder), weights, quantised, form)


def _quantised(weights: Weights, quantised: Collection[str], form: MlxFormat) -> Weights:
    """Return `weights` with those in `quantised` as MLX stores them: weight, scales and biases."""
    tensors: dict[str, TensorInfo] = {}
    source: dict[str, tuple[str, int]] = {}  # tensor -> the one that it is made of, and which part
    for name, info in weights.tensors.items():
        if name not in quantised:
            tensors[name], source[name] = info, (name, 0)
            continue
        rows, width = info.shape
        scales = TensorInfo(
            info.dtype if form.mode == "affine" else "U8", (rows, width // form.group_size)
        )
        parts = [TensorInfo("U32", (rows, width * form.bits // 32)), scales]
        if form.mode == "affine":
            parts.append(scales)
        for place, part in enumerate(parts):
            key = f"{name.removesuffix('.weight')}.{Packed._fields[place]}"
            tensors[key], source[key] = part, (name, place)

    @functools.lru_cache(maxsize=1)  # the parts of a tensor stand one after another
    def packed(name: str) -> Packed:
        return form.quantise(weights.read(name))

    def read(key: str) -> NDArray[Any]:
        name, place = source[key]
        part = packed(name)[place] if name in quantised else weights.read(name)
        assert part is not None, key
        return part

    where = {key: weights.where[name] for key, (name, _) in source.items()}
    return Weights(weights.folder, tensors, where, read)


def _require_written(
    written: Weights, weights: Weights, quantised: Collection[str], form: MlxFormat
) -> None:
    """Check each tensor on disk against the quantisation of its source."""
    for name, info in weights.tensors.items():
        expected = weights.read(name)
        if name in quantised:
            expected = form.round_trip(expected)
        found = written.tensors.get(name)
        same_kind = found and (found.dtype, found.shape) == (info.dtype, info.shape)
        if not same_kind or written.read(name).tobytes() != expected.tobytes():
            raise ProofError(
                "V001",
                "a written tensor is not the quantisation of the merged one",
                where=name,
                remedy="nothing was written; please report this with `vox merge --debug`",
            )
