"""Put the core's `AdapterState` into the modules of an mlx-lm model.

Trained values live outside the model, in a dictionary by canonical name, and are put into their
slots for each evaluation: that makes the loss a function of them, which is what MLX differentiates
and compiles.

With gradient checkpointing a layer saves only its input and recomputes the rest in the backward
pass (Chen et al., arXiv:1604.06174). MLX differentiates a checkpointed function by its arguments
only, so the trained values in the layer's slots are taken out, passed as arguments and put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from vox_core.contract import AdapterState
from vox_core.errors import AdapterError
from vox_formats.mlx_model import counterpart_fault, mlx_path
from vox_mlx.lora import Adapted, Dropout, features

if TYPE_CHECKING:
    from collections.abc import Iterator

Slots = dict[str, tuple[nn.Module, str]]


@dataclass(frozen=True, slots=True)
class Injected:
    """A base with slots for an adapter's tensors.

    Args:
        slots: canonical tensor name -> the module and the attribute that hold it.
    """

    model: nn.Module
    slots: Slots
    dropout: Dropout

    def fill(self, values: Mapping[str, mx.array], dtype: mx.Dtype) -> None:
        """Put trained values into their slots, in `dtype`; magnitudes stay float32."""
        for name, value in values.items():
            module, attribute = self.slots[name]
            exact = attribute == "magnitude"
            setattr(module, attribute, value if exact else value.astype(dtype))


def inject(
    model: nn.Module, model_type: str, state: AdapterState, dropout: float = 0.0
) -> Injected:
    """Add adapter modules for `state` to `model`.

    Raises:
        AdapterError: A002, the adapter names modules that mlx-lm's model does not have.
    """
    modules = dict(model.named_modules())
    paths = {path: mlx_path(path, model_type) for path in state.modules}
    if faults := [*_faults(state, model_type, paths, modules), *_saved_faults(state, model_type)]:
        raise AdapterError(
            "A002",
            "the adapter does not fit the model that mlx-lm builds",
            expected="linear layers of the same shape; experts are not",
            faults=faults,
            remedy="train other modules: --targets q_proj --targets v_proj …",
        )
    shared, slots = Dropout(dropout), Slots()
    for index, (path, module) in enumerate(state.modules.items()):
        adapted = Adapted(modules[paths[path]], state.scale(path), shared, index)
        _replace(modules, paths[path], adapted)
        slots[f"{path}.lora_A.weight"] = adapted, "lora_A"
        slots[f"{path}.lora_B.weight"] = adapted, "lora_B"
        if module.magnitude_O is not None:
            slots[f"{path}.lora_magnitude_vector"] = adapted, "magnitude"
    for name in state.saved:
        path, _, attribute = mlx_path(name, model_type).rpartition(".")
        slots[name] = modules[path], attribute
    return Injected(model, slots, shared)


def _faults(
    state: AdapterState,
    model_type: str,
    paths: Mapping[str, str],
    modules: Mapping[str, nn.Module],
) -> Iterator[str]:
    for path, module in state.modules.items():
        wanted = (module.B_OR.shape[0], module.A_RI.shape[1])
        there = modules.get(paths[path])
        if reason := counterpart_fault(path, model_type):
            yield f"{path}: {reason}"
        elif there is None:
            yield f"{path}: no such module"
        elif (found := features(there)) is None:
            yield f"{path}: {type(there).__name__}"
        elif found != wanted:
            yield f"{path}: the adapter is for (O, I) = {wanted}, the model has {found}"


def _saved_faults(state: AdapterState, model_type: str) -> Iterator[str]:
    for name, value in state.saved.items():
        if reason := counterpart_fault(name, model_type):
            yield f"{name}: {reason}"
        elif model_type == "gpt2" and value.ndim == 2 and ".h." in name:
            yield f"{name}: MLX stores this matrix the other way round"


def _replace(modules: Mapping[str, nn.Module], path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(modules[parent], name, new)


def recompute_layers(injected: Injected) -> None:
    """Make each layer of the model recompute its activations."""
    for layer in injected.model.layers:
        inside = {id(module) for module in layer.modules()}
        slots = {n: slot for n, slot in injected.slots.items() if id(slot[0]) in inside}
        layer.__class__ = _recomputing(type(layer), slots)


def _recomputing(base: type[nn.Module], slots: Slots) -> type[nn.Module]:
    class Layer(base):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            def compute(values: dict[str, mx.array], *args: Any) -> Any:
                for name, value in values.items():
                    setattr(*slots[name], value)
                return super(Layer, self).__call__(*args, **kwargs)

            values = {name: getattr(*slot) for name, slot in slots.items()}
            return mx.checkpoint(compute)(values, *args)

    return Layer
