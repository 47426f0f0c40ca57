"""Attach the core's `AdapterState` to a torch model as PEFT modules.

PEFT defines structure and forward; the core defines names and initial values. `Adapters` holds any
number of adapters on one base, by the core's names; one of them computes at a time, or none.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vox_core.adapter import peft
from vox_core.adapter.targets import is_beside
from vox_core.contract import AdapterState
from vox_core.errors import AdapterError, ModelError
from vox_torch.base import SILENCE
from vox_torch.libraries import import_bitsandbytes
from vox_torch.shards import is_split, own_part, part_of

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from torch import nn
    from transformers import PreTrainedModel


class Adapters:
    """A base model with adapters by name.

    Attributes:
        base: the model; its own forward computes with the selected adapter.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self.base = base
        self._peft: PeftModel | None = None
        self._keys: dict[str, str | None] = {}  # None: the base's own weights are trained
        self._selected: str | None = None
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, name: str, state: AdapterState, dropout: float = 0.0) -> dict[str, nn.Parameter]:
        """Add an adapter in the base's own dtype and select it; return its parameters by canonical
        name.

        Adapters of a bfloat16 base are bfloat16, too, so that their matrix products run on the same
        hardware units; the optimizer holds float32 master weights. With the method `full` the
        parameters are the base's own.

        Raises:
            AdapterError: A002, the parameters have other names or shapes than the adapter's.
            ModelError: M002, the same with the method `full`.
        """
        import_bitsandbytes()  # or PEFT imports it, with its warnings
        values = state.tensors()
        if state.method == "full":
            parameters = self._own(name, values)
        else:
            parameters = self._peft_parameters(name, state, dropout)
        faults = [f"{path}: only one of them has it" for path in parameters.keys() ^ values.keys()]
        faults += [
            f"{path}: {values[path].shape}, the base needs {tuple(parameter.shape)}"
            for path, parameter in parameters.items()
            if path in values and values[path].shape != tuple(parameter.shape)
        ]
        if faults:
            self.remove(name)
            if state.method == "full":
                raise _other_weights(self.base, sorted(faults))
            raise AdapterError(
                "A002",
                "the adapter does not belong to this base model",
                found="tensors that differ from the base's",
                faults=sorted(faults),
                remedy="name the base model it was trained on, with --model",
            )
        for path, parameter in parameters.items():
            # Of a whole model, transformers may keep some in float32.
            dtype = parameter.dtype if state.method == "full" else self.base.dtype
            _fill(parameter, values[path], dtype)
        return parameters

    def key(self, name: str | None) -> str | None:
        """Return PEFT's name of an adapter."""
        return None if name is None else self._keys[name]

    def remove(self, name: str) -> None:
        """Remove an adapter; the base is selected."""
        self.select(None)
        key = self._keys.pop(name)
        if self._peft is None:
            self.base.requires_grad_(False)
        elif self._keys:
            with _advice_silenced():
                self._peft.delete_adapter(key)
        else:
            self._peft.unload()
            self._peft = None

    def select(self, name: str | None) -> None:
        """Compute with an adapter from here on, or with the base alone."""
        if self._peft is None or name == self._selected:
            return
        if name is None:
            self._peft.base_model.disable_adapter_layers()
        else:
            if self._selected is None:
                self._peft.base_model.enable_adapter_layers()
            self._peft.set_adapter(self._keys[name])
        self._selected = name

    def _own(self, name: str, values: Mapping[str, object]) -> dict[str, nn.Parameter]:
        """Let the base's parameters of these names be trained."""
        self._keys[name] = None
        named = self.base.named_parameters()
        return {path: each.requires_grad_() for path, each in named if path in values}

    def _peft_parameters(
        self, name: str, state: AdapterState, dropout: float
    ) -> dict[str, nn.Parameter]:
        require_linear(self.base, state)
        # PEFT's names are attributes of modules, which may hold no dot; names of vox's are free.
        key = f"adapter{next(self._numbers)}"
        self._inject(key, peft_config(self.base, state, dropout))
        self._keys[name] = key
        self.select(name)
        return dict(trained_parameters(self.base, key))

    def _inject(self, key: str, config: LoraConfig) -> None:
        with _advice_silenced():
            from peft import get_peft_model

            if self._peft is None:
                self._peft = get_peft_model(self.base, config, key, autocast_adapter_dtype=False)
            else:
                self._peft.add_adapter(key, config, autocast_adapter_dtype=False)


@dataclass(frozen=True, slots=True)
class Adapted:
    """A base with one adapter, and the trained parameters by canonical name."""

    model: PreTrainedModel
    parameters: Mapping[str, nn.Parameter]


def attach(base: PreTrainedModel, state: AdapterState, dropout: float = 0.0) -> Adapted:
    """Attach a single adapter to `base`; see `Adapters.add`."""
    return Adapted(base, Adapters(base).add("adapter", state, dropout))


def require_linear(base: PreTrainedModel, state: AdapterState) -> None:
    """Raise an A002 unless every module of `state` is a linear layer of `base`."""
    from peft.tuners.lora import LoraLayer
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    modules = {
        path: each.get_base_layer() if isinstance(each, LoraLayer) else each
        for path, each in base.named_modules()
    }
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


def require_every_weight(base: PreTrainedModel, trained: Collection[str]) -> None:
    """Raise an M002 if the language model has a parameter that is not trained: the files call it
    something else, or lack it."""
    names = [name for name, _ in base.named_parameters() if not is_beside(name)]
    if missing := [name for name in names if name not in trained]:
        raise _other_weights(base, missing)


def _other_weights(base: PreTrainedModel, faults: Sequence[str]) -> ModelError:
    return ModelError(
        "M002",
        "the model that transformers builds has other weights than its files",
        where=base.name_or_path,
        faults=faults,
        remedy="train with an adapter, or only some modules with --targets",
    )


def peft_config(base: PreTrainedModel, state: AdapterState, dropout: float) -> LoraConfig:
    """Return the `LoraConfig` that builds exactly the modules of `state`, each with its rank and
    alpha."""
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    # Without the base's modules, targets are whole paths.
    stored = peft.peft_config(state, base="", modules={}, dropout=dropout)
    found = (base.get_submodule(path) for path in state.modules)
    transposed = any(isinstance(getattr(each, "base_layer", each), Conv1D) for each in found)
    return LoraConfig(**{**stored, "fan_in_fan_out": transposed, "inference_mode": False})


def trained_parameters(
    model: PreTrainedModel, key: str
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (canonical name, parameter) of the selected adapter, in the model's order.

    Args:
        key: the adapter's name in PEFT.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield canonical_name(name, key), parameter


def canonical_name(name: str, key: str) -> str:
    """Convert the name of a parameter of adapter `key` to the core's, which PEFT uses in files."""
    return (
        name.replace(f".lora_magnitude_vector.{key}.weight", ".lora_magnitude_vector")
        .replace(f".modules_to_save.{key}.", ".")
        .replace(f".{key}.weight", ".weight")
    )


def only_adapter_dropout(model: nn.Module) -> None:
    """Enable training mode for the adapter's dropout only.

    A base's own dropout (GPT-2 has 0.1 in four places) would change the first loss from the base
    model's, differently on each backend. Layers recompute activations in training mode only, by the
    layer's own flag, not those of its modules. PEFT's layers need their own flag, too; without it
    DoRA has no dropout.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.eval()
    for name, module in model.named_modules():
        if name.endswith(".lora_dropout"):
            module.train()
        elif isinstance(module, GradientCheckpointingLayer):
            module.training = module.gradient_checkpointing
        elif hasattr(module, "lora_dropout"):
            module.training = True


def _fill(parameter: torch.nn.Parameter, value: object, dtype: torch.dtype) -> None:
    import torch

    tensor = torch.tensor(value, dtype=torch.float32)
    with torch.no_grad():
        if is_split(parameter):
            own_part(parameter).copy_(part_of(tensor, parameter))
            return
        parameter.data = tensor.to(device=parameter.device, dtype=dtype)


@contextmanager
def _advice_silenced() -> Iterator[None]:
    # PEFT warns of deprecations inside transformers, which users of vox cannot fix.
    with SILENCE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
