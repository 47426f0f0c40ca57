"""Attach the core's `AdapterState` to a torch model as PEFT modules.

PEFT defines structure and forward; the core defines names and initial values. `attach` puts an
adapter's values into a base; `Adapted.tensors` gives the trained parameters by the core's names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vox_core.adapter import peft
from vox_core.contract import AdapterState
from vox_core.errors import AdapterError
from vox_torch.libraries import import_bitsandbytes

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Adapted:
    """A base with an adapter, and the trained parameters by canonical name."""

    model: PeftModel
    parameters: Mapping[str, torch.nn.Parameter]


def attach(base: PreTrainedModel, state: AdapterState, dropout: float = 0.0) -> Adapted:
    """Attach `state` to `base`, in the base's own dtype.

    Adapters of a bfloat16 base are bfloat16, too, so that their matrix products run on the same
    hardware units; the optimizer holds float32 master weights.

    Raises:
        AdapterError: A002, PEFT's parameters differ from the adapter's.
    """
    _require_linear(base, state)
    import_bitsandbytes()  # or PEFT imports it, with its warnings
    with _advice_silenced():
        from peft import get_peft_model

        model = get_peft_model(
            base, peft_config(base, state, dropout), autocast_adapter_dtype=False
        )
    parameters = dict(trained_parameters(model))
    values = state.tensors()
    if faults := sorted(parameters.keys() ^ values.keys()):
        raise AdapterError(
            "A002",
            "the adapter does not belong to this base model",
            found="modules which only one of them has",
            faults=faults,
            remedy="name the base model it was trained on, with --model",
        )
    for name, parameter in parameters.items():
        _fill(parameter, values[name], base.dtype)
    return Adapted(model, parameters)


def _require_linear(base: PreTrainedModel, state: AdapterState) -> None:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    modules = dict(base.named_modules())
    strange = [
        f"{path}: {type(modules.get(path)).__name__ if path in modules else 'no such module'}"
        for path in state.modules
        if not isinstance(modules.get(path), nn.Linear | Conv1D)
    ]
    if strange:
        raise AdapterError(
            "A002",
            "the files name modules that are not linear layers in the model transformers builds",
            where=base.name_or_path,
            expected="linear layers; experts that are stored one by one are not",
            faults=strange,
            remedy="train other modules: --targets q_proj --targets v_proj …",
        )


def peft_config(base: PreTrainedModel, state: AdapterState, dropout: float) -> LoraConfig:
    """Return the `LoraConfig` that builds exactly the modules of `state`, each with its rank and
    alpha."""
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    # Without the base's modules, targets are whole paths.
    stored = peft.peft_config(state, base="", modules={}, dropout=dropout)
    transposed = any(isinstance(base.get_submodule(path), Conv1D) for path in state.modules)
    return LoraConfig(**{**stored, "fan_in_fan_out": transposed, "inference_mode": False})


def trained_parameters(model: PeftModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (canonical name, parameter) of every trained parameter, in the model's order."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield canonical_name(name), parameter


def canonical_name(name: str) -> str:
    """Convert a PEFT parameter's name to the core's, which PEFT also uses in files."""
    return (
        name.removeprefix(peft.PREFIX)
        .replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector")
        .replace(".modules_to_save.default.", ".")
        .replace(".default.weight", ".weight")
    )


def _fill(parameter: torch.nn.Parameter, value: object, dtype: torch.dtype) -> None:
    import torch

    tensor = torch.tensor(value, dtype=torch.float32)
    with torch.no_grad():
        parameter.data = tensor.to(device=parameter.device, dtype=dtype)


@contextmanager
def _advice_silenced() -> Iterator[None]:
    # PEFT warns of deprecations inside transformers, which users of vox cannot fix.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
