"""Load a base model: a local folder, safetensors only, frozen, in one dtype or quantised.

`without_weights` builds a model on the meta device, for loaders that replace weights (load.py's
streamed models, quantised.py).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core.adapter.targets import parameter_names
from vox_core.contract import DType, Quant
from vox_core.errors import ModelError
from vox_core.weights import WeightFolder, Weights
from vox_torch.arrays import as_tensor
from vox_torch.experts import experts_of, model_weights
from vox_torch.memory import is_out_of_memory

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

SILENCE = threading.RLock()
"""Held while settings of the whole process silence a library."""
_AN_EXPERT = re.compile(r"\.experts\.\d+\.")
DTYPES: dict[DType, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def torch_dtype(name: DType) -> torch.dtype:
    """Return the torch dtype of a contract's dtype name."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def load_base(folder: Path, dtype: DType, device: str, quant: Quant = "none") -> PreTrainedModel:
    """Load the model of `folder`, frozen and in evaluation mode, optionally quantised.

    Raises:
        ModelError: M002, transformers cannot build this model or its weights do not fit.
    """
    if quant == "none":
        mixture = _load_mixture(folder, torch_dtype(dtype), device)
        model = mixture or _load_plain(folder, dtype, device)
    else:
        from vox_torch.quantised import load_quantised

        model = load_quantised(folder, torch_dtype(dtype), device, quant)
    model.requires_grad_(False)
    return model.to(device).eval()


def _load_plain(folder: Path, dtype: DType, device: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with quiet(), model_errors(folder):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch_dtype(dtype),
            device_map=None if device == "cpu" else device,  # tensor by tensor, not by way of RAM
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if missing:
        raise ModelError(
            "M002",
            "weights are missing from the model folder, or have the wrong shape",
            where=folder,
            faults=missing,
            remedy="fetch the model again, whole",
        )
    return model


def _load_mixture(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel | None:
    """Load a mixture whose experts are stored one by one, tensor by tensor; None of other models.

    transformers maps whole files until the last tensor in them is freed: experts that have become
    stacks would be in memory twice.
    """
    if not any(_AN_EXPERT.search(name) for name in WeightFolder(folder).tensors):
        return None
    model = without_weights(folder, dtype)
    if not any(experts_of(model)):
        return None
    weights = model_weights(model, folder)
    fill_parameters(model, weights, stored_names(model, weights), dtype, device)
    fill_buffers(model, weights, lambda tensor: as_tensor(weights.read(tensor)).clone())
    model.tie_weights()
    return model


@contextmanager
def model_errors(folder: Path) -> Iterator[None]:
    """Map exceptions of transformers for a model it cannot build to a `ModelError`; leave out of
    memory as it is."""
    try:
        yield
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            "M002",
            "transformers cannot load this model",
            where=folder,
            found=f"{type(error).__name__}: {error}",
            remedy="check that the folder is whole, and that the installed transformers knows "
            "its model_type",
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice, in one thread at a time: the settings are the
    process's. vox reports what matters itself."""
    from transformers.utils import logging

    with SILENCE:
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        if "TRANSFORMERS_VERBOSITY" not in os.environ:
            logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def without_weights(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of `folder`: parameters on the meta device, buffers computed.

    Raises:
        ModelError: M002, transformers cannot build it.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet(), model_errors(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def stored_names(model: PreTrainedModel, weights: Weights) -> dict[str, str]:
    """Return parameter name -> tensor name; tied parameters map to the stored tensor.

    Raises:
        ModelError: M002, the files and the parameters do not match one to one.
    """
    stored = parameter_names(weights.tensors, model.config.model_type)
    parameters = list(model.named_parameters(remove_duplicate=False))
    of_parameter = {id(p): stored[name] for name, p in parameters if name in stored}
    names = {n: stored.get(n) or of_parameter.get(id(p), "") for n, p in parameters}
    missing = [name for name, tensor in names.items() if not tensor]
    wrong = [
        f"{name}: {list(weights.tensors[names[name]].shape)}, expected {list(parameter.shape)}"
        for name, parameter in parameters
        if names[name] and weights.tensors[names[name]].shape != tuple(parameter.shape)
    ]
    if missing or wrong:
        raise _unfit(model, missing + wrong)
    return names


def _unfit(model: PreTrainedModel, faults: list[str]) -> ModelError:
    return ModelError(
        "M002",
        "weights are missing from the model folder, have the wrong shape, or are stored under "
        "unknown names",
        where=model.name_or_path,
        faults=faults,
        remedy="fetch the model again, whole",
    )


def stored_buffers(model: PreTrainedModel, weights: Weights) -> dict[str, str]:
    """Return name -> tensor name of stored buffers, such as a scale per layer.

    Raises:
        ModelError: M002, one is missing.
    """
    stored = parameter_names(weights.tensors, model.config.model_type)
    names = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    ]
    if missing := [name for name in names if name not in stored]:
        raise _unfit(model, missing)
    return {name: stored[name] for name in names}


def fill_buffers(
    model: PreTrainedModel, weights: Weights, read: Callable[[str], torch.Tensor]
) -> None:
    """Load the stored values of buffers, in their own dtype."""
    for name, tensor in stored_buffers(model, weights).items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        value = read(tensor)
        setattr(module, leaf, value.to(getattr(module, leaf).dtype).reshape(value.shape))


def materialise(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a meta tensor by a frozen parameter."""
    import torch

    owner, _, leaf = name.rpartition(".")
    parameter = torch.nn.Parameter(value, requires_grad=False)
    setattr(model.get_submodule(owner), leaf, parameter)


def fill_parameters(
    model: PreTrainedModel,
    weights: Weights,
    names: Mapping[str, str],
    dtype: torch.dtype,
    device: str = "cpu",
    below: str = "",
) -> None:
    """Load the parameters that are on the meta device, tensor by tensor.

    Args:
        names: parameter name -> tensor name.
        below: only parameters whose names begin so.
    """
    import torch

    wide = _kept_wide(model, dtype)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta and name.startswith(below):
            own = torch.float32 if any(part in name for part in wide) else dtype
            value = as_tensor(weights.read(names[name])).to(device=device, dtype=own, copy=True)
            materialise(model, name, value)


def _kept_wide(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return name parts of parameters that a family keeps in float32 beside half precision."""
    import torch

    if dtype == torch.float32:
        return set()
    strict = set(model._keep_in_fp32_modules_strict or ())
    return strict | set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else strict
