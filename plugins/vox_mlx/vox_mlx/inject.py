"""Put the core's `AdapterState`s into the modules of an mlx-lm model, several of them by name.

A learner's values live outside the model, in a dictionary by canonical name, and are put into their
slots for each evaluation: that makes the loss a function of them, which is what MLX differentiates
and compiles.

With gradient checkpointing a layer saves only its input and recomputes the rest in the backward
pass (Chen et al., arXiv:1604.06174). MLX differentiates a checkpointed function by its arguments
only, so the trained values in the layer's slots are taken out, passed as arguments and put back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn

from vox_core.contract import AdapterState
from vox_core.errors import AdapterError, ModelError
from vox_formats.mlx_model import counterpart_fault, mlx_path
from vox_mlx.arrays import float32
from vox_mlx.base import HEADS
from vox_mlx.lora import Active, Adapted, Dropout, Lora, features

Values = dict[str, mx.array]
Slots = dict[str, tuple[nn.Module, str]]
"""Canonical tensor name -> the module and the attribute that hold it."""


class Adapters:
    """The adapters of a base model, by name, of which each evaluation chooses some.

    Tensors of `modules_to_save` replace the base's own: rows that are evaluated together have the
    same ones (`lane`). With the method `full` they become the base's own, and the only ones.

    Args:
        dtype: of the adapters' tensors in the model; magnitudes stay float32.
        dropout: rate of the adapters' inputs, in evaluations with a key.
    """

    def __init__(
        self, model: nn.Module, model_type: str, dtype: mx.Dtype, dropout: float = 0.0
    ) -> None:
        self._model, self._model_type, self._dtype = model, model_type, dtype
        self.dropout = Dropout(dropout)
        self._active = Active()
        self._slots: dict[str, Slots] = {}
        self._saved: dict[str, Values] = {}
        self._own: dict[tuple[int, str], tuple[nn.Module, str, mx.array]] = {}
        self._unsettled: set[str] = set()
        # The head computes chosen positions by its class (`loss.choose_at_head`), which would be
        # hidden in a wrapper added later.
        modules = dict(model.named_modules())
        for path in [
            p for p, m in modules.items() if p.rpartition(".")[2] in HEADS and features(m)
        ]:
            self._adapted(modules, path)

    def add(self, name: str, state: AdapterState, values: Values | None = None) -> None:
        """Add an adapter.

        Args:
            values: float32, by canonical name; left out, those of `state`.

        Raises:
            AdapterError: A002, it names modules that mlx-lm's model does not have.
            ModelError: M002, the same with the method `full`.
        """
        paths = {path: mlx_path(path, self._model_type) for path in state.modules}
        modules = dict(self._model.named_modules())
        self._require_fit(state, paths, modules)
        slots = Slots()
        for index, (path, module) in enumerate(state.modules.items()):
            lora = Lora(state.scale(path), self.dropout, index)
            self._adapted(modules, paths[path]).adapters[name] = lora
            slots[f"{path}.lora_A.weight"] = lora, "lora_A"
            slots[f"{path}.lora_B.weight"] = lora, "lora_B"
            if module.magnitude_O is not None:
                slots[f"{path}.lora_magnitude_vector"] = lora, "magnitude"
        for tensor in state.saved:
            slots[tensor] = holder, attribute = _holder(tensor, self._model_type, modules)
            if state.method != "full":
                own = holder, attribute, holder[attribute]
                self._own.setdefault((id(holder), attribute), own)
        self._slots[name] = slots
        if state.method != "full":
            self._saved[name] = {}
        self.fill(name, values or {n: float32(value) for n, value in state.tensors().items()})

    def remove(self, name: str) -> None:
        """Remove an adapter; its layers stay, without it."""
        self.choose([None])
        for module in self._model.modules():
            if isinstance(module, Adapted):
                module.adapters.pop(name, None)
        del self._slots[name]
        self._saved.pop(name, None)
        self._unsettled.discard(name)

    def fill(self, name: str, values: Mapping[str, mx.array]) -> None:
        """Put an adapter's values into the model."""
        for tensor, value in values.items():
            module, attribute = self._slots[name][tensor]
            if isinstance(module, Lora):
                exact = attribute == "magnitude"
                setattr(module, attribute, value if exact else value.astype(self._dtype))
                module.unsettle()
                continue
            stored = _form(tensor, self._model_type)(value).astype(self._dtype)
            if name in self._saved:
                self._saved[name][tensor] = stored
            else:
                setattr(module, attribute, stored)
        self._unsettled.add(name)

    def choose(self, names: Sequence[str | None], *, decoding: bool = False) -> None:
        """Set the adapter of each row of the next evaluation; a single name is that of all.

        Args:
            decoding: each row is a single position; only then may adapters differ by row.
        """
        for module, attribute, own in self._own.values():
            setattr(module, attribute, own)
        for name in {name for name in names if name is not None}:
            for tensor, value in self._saved.get(name, {}).items():
                setattr(*self._slots[name][tensor], value)
        self._active.choose(names, decoding=decoding)

    def settle(self, names: Iterable[str | None]) -> None:
        """Precompute what decoding needs of these adapters."""
        if not (wanted := self._unsettled.intersection(names)):
            return
        for module in self._model.modules():
            if isinstance(module, Adapted):
                for name in wanted & module.adapters.keys():
                    module.adapters[name].settle(module.linear)
        self._unsettled -= wanted

    def lane(self, name: str | None) -> str | None:
        """Return what rows must have in common to be evaluated together."""
        return name if name is not None and self._saved.get(name) else None

    def require_every_weight(self, name: str) -> None:
        """Raise an M002 if the base has a parameter that is not one of this whole model's."""
        trained = {(id(module), attribute) for module, attribute in self._slots[name].values()}
        missing = [
            f"{path}.{attribute}".strip(".")
            for path, module in self._model.named_modules()
            for attribute, value in module.items()
            if isinstance(value, mx.array)
            and module.valid_parameter_filter(module, attribute, value)
            and (id(module), attribute) not in trained
        ]
        if missing:
            raise _other_weights(missing)

    def chosen_slots(self, layer: nn.Module) -> Slots:
        """Return the slots within `layer` of the one adapter that is chosen."""
        inside = {id(module) for module in layer.modules()}
        (name,) = self._active.groups
        return {n: slot for n, slot in self._slots[name].items() if id(slot[0]) in inside}

    def _adapted(self, modules: dict[str, nn.Module], path: str) -> Adapted:
        """Return the wrapper of a linear layer, made if there is none."""
        if not isinstance(modules[path], Adapted):
            parent, _, attribute = path.rpartition(".")
            modules[path] = Adapted(modules[path], self._active)
            setattr(modules[parent], attribute, modules[path])
        return modules[path]

    def _require_fit(
        self, state: AdapterState, paths: Mapping[str, str], modules: Mapping[str, nn.Module]
    ) -> None:
        faults = [
            *_faults(state, self._model_type, paths, modules),
            *_saved_faults(state, self._model_type, modules),
        ]
        if faults and state.method == "full":
            raise _other_weights(faults)
        if faults:
            wrong = {fault.partition(":")[0] for fault in faults}
            others = {path.rpartition(".")[2] for path in state.modules.keys() - wrong}
            raise AdapterError(
                "A002",
                "the adapter does not fit the model that mlx-lm builds",
                expected="linear layers of the same shape; experts are not",
                faults=faults,
                remedy=" --targets ".join(["train other modules:", *sorted(others)]),
            )


def _other_weights(faults: Sequence[str]) -> ModelError:
    return ModelError(
        "M002",
        "the model that mlx-lm builds has other weights than the files",
        faults=faults,
        remedy="train with an adapter, or with --backend cpu or cuda",
    )


def _linear(module: nn.Module) -> nn.Module:
    return module.linear if isinstance(module, Adapted) else module


def _holder(
    tensor: str, model_type: str, modules: Mapping[str, nn.Module]
) -> tuple[nn.Module, str] | None:
    """Return the module and the attribute of a parameter; None if there is none."""
    path, _, attribute = mlx_path(tensor, model_type).rpartition(".")
    module = modules.get(path)
    holder = module and _linear(module)
    return (holder, attribute) if holder and attribute in holder else None


def _faults(
    state: AdapterState,
    model_type: str,
    paths: Mapping[str, str],
    modules: Mapping[str, nn.Module],
) -> Iterator[str]:
    for path, module in state.modules.items():
        wanted = (module.B_OR.shape[0], module.A_RI.shape[1])
        there = modules.get(paths[path])
        there = there and _linear(there)
        if reason := counterpart_fault(path, model_type):
            yield f"{path}: {reason}"
        elif there is None:
            yield f"{path}: no such module"
        elif (found := features(there)) is None:
            yield f"{path}: {type(there).__name__}"
        elif found != wanted:
            yield f"{path}: the adapter is for (O, I) = {wanted}, the model has {found}"


def _saved_faults(
    state: AdapterState, model_type: str, modules: Mapping[str, nn.Module]
) -> Iterator[str]:
    for name, value in state.saved.items():
        found, form = _holder(name, model_type, modules), _form(name, model_type)
        if form is _same and (reason := counterpart_fault(name, model_type)):
            yield f"{name}: {reason}"
        elif found is None:
            yield f"{name}: no such parameter"
        elif (shape := getattr(*found).shape) != form(mx.zeros(value.shape)).shape:
            yield f"{name}: {value.shape}, the model has {shape}"


def _same(value: mx.array) -> mx.array:
    return value


def _transposed(value: mx.array) -> mx.array:
    return value.T


def _channels_last(value: mx.array) -> mx.array:
    return value.moveaxis(2, 1)


def _plus_one(value: mx.array) -> mx.array:
    return value + 1


_QWEN3_5 = {
    r".*\.conv1d\.weight": _channels_last,
    r".*(layernorm|model\.norm|[qk]_norm)\.weight": _plus_one,
}
_FORMS: dict[str, dict[str, Callable[[mx.array], mx.array]]] = {
    "gpt2": {r".*\.h\.\d+\.(attn|mlp)\.c_\w+\.weight": _transposed},
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": _QWEN3_5,
}
"""Family -> pattern of parameters -> how mlx-lm stores one, as `sanitize` of its model does."""


@cache
def _form(tensor: str, model_type: str) -> Callable[[mx.array], mx.array]:
    forms = _FORMS.get(model_type, {})
    return next((form for each, form in forms.items() if re.fullmatch(each, tensor)), _same)


def recompute_layers(model: nn.Module, adapters: Adapters) -> None:
    """Make each layer of the model recompute its activations in training."""
    for layer in model.layers:
        layer.__class__ = _recomputing(type(layer), adapters)


def _recomputing(base: type[nn.Module], adapters: Adapters) -> type[nn.Module]:
    class Layer(base):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                return super().__call__(*args, **kwargs)
            slots = adapters.chosen_slots(self)

            def compute(values: Values, *args: Any) -> Any:
                for name, value in values.items():
                    setattr(*slots[name], value)
                return super(Layer, self).__call__(*args, **kwargs)

            values = {name: getattr(*slot) for name, slot in slots.items()}
            return mx.checkpoint(compute)(values, *args)

    return Layer
