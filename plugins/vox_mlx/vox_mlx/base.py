"""Load a base model with mlx-lm's definition of its family: frozen, in one dtype, optionally
quantised.

A folder that is already quantised is loaded unchanged. Otherwise `--quant` quantises each linear
layer except the output head, and the experts of a mixture, from the stored weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.adapter.targets import linear_modules, quantised_modules
from vox_core.contract import DType, Quant
from vox_core.errors import ModelError
from vox_core.weights import WeightFolder
from vox_formats import FormatError
from vox_formats.mlx_model import mlx_config, mlx_path, window
from vox_formats.quant import MLX_FORMATS

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn

DTYPES: dict[DType, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

HEADS = ("lm_head", "embed_out")
_ELSEWHERE = "use a torch backend for this model: --backend cpu, or cuda"


def mlx_dtype(name: DType) -> mx.Dtype:
    """Return the MLX dtype of a contract's dtype name."""
    import mlx.core as mx

    dtype: mx.Dtype = getattr(mx, DTYPES[name])
    return dtype


def load_base(
    folder: Path, dtype: DType, quant: Quant = "none", *, lazy: bool = False
) -> nn.Module:
    """Load the model of `folder`, frozen and in evaluation mode.

    Args:
        lazy: read each weight from the files on first use.

    Raises:
        ModelError: M002, mlx-lm cannot build this model or its weights do not fit.
    """
    import mlx.core as mx

    from vox_mlx.definitions import correct
    from vox_mlx.lora import unpack_on_cpu

    config = _mlx_config(folder)
    if dtype == "fp16" and config["model_type"].startswith("gemma3"):
        raise _overflows(folder)
    with model_errors(folder):
        model = _build(folder, config)
    if quant != "none" and "quantization" not in config:
        _quantise(model, quant, folder, config["model_type"])
    _require_product(model, folder, dtype)
    correct(model, config)
    unpack_on_cpu(model)
    _cast(model, mlx_dtype(dtype))
    model.freeze()
    if not lazy:
        mx.eval(model.parameters())
    return model


def require_window(config: Mapping[str, Any], length: int) -> None:
    """Refuse a document longer than a sliding window that mlx-lm ignores.

    Raises:
        ModelError: M002.
    """
    size = window(config)
    if size is not None and length > size:
        raise ModelError(
            "M002",
            "mlx-lm leaves out this model's sliding window, and would compute another model",
            found=f"a document of {length} tokens, a window of {size}",
            remedy=f"shorten documents to the window, with --seq-len {size}, or {_ELSEWHERE}",
        )


def _mlx_config(folder: Path) -> dict[str, Any]:
    try:
        return mlx_config(read_config(folder))
    except FormatError as error:
        raise ModelError(
            "M002",
            where=folder / "config.json",
            **error.facts,
            remedy=_ELSEWHERE,
        ) from error


def _overflows(folder: Path) -> ModelError:
    # mlx-lm clips them: the loss of Gemma 3 270M is 9.1 where it should be 8.2.
    return ModelError(
        "M002",
        "the hidden states of Gemma 3 exceed float16",
        where=folder,
        found="--dtype fp16",
        expected="bf16 or fp32",
        remedy="use --dtype bf16",
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's `config.json`, with transformers' defaults written out.

    mlx-lm has other defaults: a Llama without `tie_word_embeddings` would be tied.

    Raises:
        ModelError: M002, it is missing, or transformers cannot read it.
    """
    from transformers import CONFIG_MAPPING

    with model_errors(folder):
        config = json.loads((folder / "config.json").read_bytes())
        whole = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    return _filled(config, whole)


def _filled(config: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with the keys of `whole` that it lacks, in nested tables, too."""
    filled = {key: value for key, value in whole.items() if value is not None} | config
    for key, part in config.items():
        if isinstance(part, dict) and isinstance(whole.get(key), dict) and "model_type" in part:
            filled[key] = _filled(part, whole[key])
    return filled


@contextmanager
def model_errors(folder: Path) -> Iterator[None]:
    """Map exceptions of mlx-lm for a model it cannot build to a `ModelError`."""
    try:
        yield
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, AttributeError) as error:
        raise ModelError(
            "M002",
            "mlx-lm cannot load this model",
            where=folder,
            found=f"{type(error).__name__}: {error}",
            remedy="check that the folder is whole; a family that mlx-lm does not know can be "
            "trained with --backend cpu or cuda",
        ) from error


def _build(folder: Path, config: dict[str, Any]) -> nn.Module:
    from mlx_lm.utils import load_model

    from vox_mlx.definitions import model_classes

    model, _ = load_model(folder, lazy=True, model_config=config, get_model_classes=model_classes)
    return model


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast the parameters, but for what decides between experts, as transformers does."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    def cast(name: str, value: mx.array) -> mx.array:
        kept = name.endswith(("e_score_correction_bias", "expert_bias"))
        kept = kept or not mx.issubdtype(value.dtype, mx.floating)
        return value if kept else value.astype(dtype)

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantise(model: nn.Module, quant: Quant, folder: Path, model_type: str) -> None:
    """Quantise linear layers and experts.

    Raises:
        ModelError: M002, a width does not fit, or mlx-lm's model has another layer.
    """
    import mlx.core as mx
    from mlx import nn
    from mlx_lm.models.switch_layers import SwitchLinear

    tensors, form = WeightFolder(folder).tensors, MLX_FORMATS[quant]
    linear = linear_modules(tensors, model_type)
    reached = quantised_modules(tensors, model_type, quant)
    paths = {mlx_path(path, model_type): path for path in reached if path in linear}
    missing = sorted(paths.keys() - dict(model.named_modules()).keys())
    faults = [f"{paths[path]}: mlx-lm's model has no such module" for path in missing]
    widths = {path: form.fault(module.in_features) for path, module in reached.items()}
    if faults := [*faults, *(f"{path}: {fault}" for path, fault in widths.items() if fault)]:
        raise ModelError(
            "M002",
            "this model cannot be quantised so",
            where=folder,
            found=f"--quant {quant}",
            faults=faults,
            remedy=f"leave out --quant, or {_ELSEWHERE}",
        )
    # Always on the CPU: GPU kernels may break ties differently, and a merge onto the trained base
    # needs the same weights as training.
    with mx.stream(mx.cpu):
        nn.quantize(
            model,
            **form.describe(),
            class_predicate=lambda path, module: path in paths or isinstance(module, SwitchLinear),
        )


def _require_product(model: nn.Module, folder: Path, dtype: DType) -> None:
    """Refuse experts in 16 bits on a CPU, where MLX has no such product (M002)."""
    import mlx.core as mx
    from mlx_lm.models.switch_layers import SwitchLinear

    if dtype == "fp32" or mx.default_device().type == mx.DeviceType.gpu:
        return
    if any(isinstance(module, SwitchLinear) for module in model.modules()):
        raise ModelError(
            "M002",
            "on a CPU, MLX multiplies experts in float32 alone",
            where=folder,
            found=f"--dtype {dtype}",
            expected="fp32, or quantised experts",
            remedy="use --dtype fp32, or --quant affine4",
        )
