"""`vox merge --quant`: write a merged checkpoint with linear layers in MLX's quantised format.

Reads an unquantised checkpoint and writes a quantised one, file by file; embeddings, norms and the
output head stay unquantised, as in training with `--quant`. Where mlx-lm and transformers use
different keys, `config.json` has both. Afterwards every tensor is read back from disk and must
equal the quantisation of its source, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from vox_core.api.files import read_json, write_json
from vox_core.api.models import (
    INDEX,
    Spec,
    Tensors,
    WeightFolder,
    copy_companions,
    open_weights,
    positions,
    quantised_modules,
    require_no_experts,
    require_same_in_mlx,
    spec_of,
    write_shards,
)
from vox_core.contract import Quant
from vox_core.errors import ModelError, PlanError, ProofError
from vox_formats import FormatError
from vox_formats.mlx_model import mlx_config, window
from vox_formats.quant import MLX_FORMATS, MlxFormat


def require_quantisable(model: Path, name: str) -> None:
    """Refuse, before any work, a model that cannot be written in the format.

    Args:
        model: the base of the merged model.
        name: a key of `MLX_FORMATS`.

    Raises:
        ModelError: M002, MLX stores the family in another layout, or mlx-lm does not support a
            setting of the model.
        PlanError: P001, the model has experts, or modules do not fit the format.
    """
    config = read_json(model / "config.json")
    require_same_in_mlx(config["model_type"], model)
    tensors, quant, form = open_weights(model).tensors, cast("Quant", name), MLX_FORMATS[name]
    require_no_experts(quant, config, tensors)
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
    """Return every setting of the family, as transformers reads `config`."""
    from transformers import CONFIG_MAPPING

    try:
        read = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    except Exception as error:
        raise _refused("transformers cannot read the configuration", folder, error) from error
    return {key: value for key, value in read.to_diff_dict().items() if value is not None}


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window of a layer that mlx-lm without vox would ignore."""
    if config["model_type"] == "mistral":  # only vox's backend applies its window
        size = config.get("sliding_window")
        return size if isinstance(size, int) else None
    return window(config)


def _refused(what: str, folder: Path, found: object) -> ModelError:
    return ModelError(
        "M002",
        what,
        where=folder / "config.json",
        found=found,
        expected="a model that `mlx_lm.load` computes as transformers does",
        remedy="leave out --quant",
    )


def requantise(plain: Path, folder: Path, name: str) -> None:
    """Write the checkpoint `plain` quantised into `folder`, and verify it.

    Args:
        name: a key of `MLX_FORMATS`.

    Raises:
        ProofError: V001, a tensor on disk is not the quantisation of its source.
    """
    weights = WeightFolder(plain)
    model_type = read_json(plain / "config.json")["model_type"]
    reached = quantised_modules(weights.tensors, model_type, cast("Quant", name)).values()
    writer = _Writer(weights, {module.tensor for module in reached}, MLX_FORMATS[name])
    writer.write(folder)
    writer.check(folder)


class _Writer:
    """Writer of one checkpoint that quantises the tensors in `quantised`."""

    def __init__(self, weights: WeightFolder, quantised: Collection[str], form: MlxFormat) -> None:
        self._weights, self._quantised, self._form = weights, quantised, form

    def write(self, folder: Path) -> None:
        weights = self._weights
        write_shards(folder, weights, self._specs, self._tensors)
        if weights.index is not None:
            write_json(folder / INDEX, self._index(weights.index))
        copy_companions(weights.folder, folder)
        config = read_json(folder / "config.json")
        adapted = mlx_lm_config(config, weights.folder)
        write_json(folder / "config.json", {**adapted, "quantization": self._form.describe()})

    def check(self, folder: Path) -> None:
        """Check each tensor on disk against the quantisation of its source."""
        written, weights = open_weights(folder), self._weights
        for name in weights.tensors:
            expected = weights.read(name)
            if name in self._quantised:
                expected = self._form.round_trip(expected)
            same_kind = name in written.tensors and spec_of(written, name) == spec_of(weights, name)
            if not same_kind or written.read(name).tobytes() != expected.tobytes():
                raise ProofError(
                    "V001",
                    "a written tensor is not the quantisation of the merged one",
                    where=name,
                    remedy="nothing was written; please report this with `vox merge --debug`",
                )

    def _specs(self, name: str) -> dict[str, Spec]:
        """Return the tensors that replace one: itself, or weight, scales and biases."""
        dtype, shape = spec_of(self._weights, name)
        if name not in self._quantised:
            return {name: (dtype, shape)}
        path, groups = name.removesuffix(".weight"), (shape[0], shape[1] // self._form.group_size)
        affine = self._form.mode == "affine"
        parts: dict[str, Spec] = {
            name: ("U32", (shape[0], shape[1] * self._form.bits // 32)),
            f"{path}.scales": (dtype if affine else "U8", groups),
        }
        return {**parts, f"{path}.biases": (dtype, groups)} if affine else parts

    def _tensors(self, names: list[str]) -> Tensors:
        for name in names:
            W = self._weights.read(name)
            if name not in self._quantised:
                yield name, W
                continue
            path, packed = name.removesuffix(".weight"), self._form.quantise(W)
            yield name, packed.weight
            yield f"{path}.scales", packed.scales
            if packed.biases is not None:
                yield f"{path}.biases", packed.biases

    def _index(self, index: Mapping[str, Any]) -> dict[str, Any]:
        where = {
            part: self._weights.file_of(name)
            for name in self._weights.tensors
            for part in self._specs(name)
        }
        return {**index, "metadata": {}, "weight_map": where}
