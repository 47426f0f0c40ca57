"""Experts of a mixture, which most files store one by one and transformers holds as stacks.

`experts.3.gate_proj.weight` above `experts.3.up_proj.weight` is row 3 of `experts.gate_up_proj`.
transformers has a table of such names for each family, which PEFT reads too; vox takes it for the
models whose weights it reads itself, tensor by tensor.

Shape legend: E experts, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core.weights import TensorInfo, WeightFolder, Weights
from vox_torch.arrays import float32

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelWeights(Weights):
    """The weights of a folder, also by the names that transformers' model has for them.

    Args:
        stacks: parameter of shape (E, O, I) -> for each expert, the tensors that hold its rows.
    """

    stacks: Mapping[str, list[list[str]]] = field(default_factory=dict)

    def expert(self, name: str, number: int) -> NDArray[Any]:
        """Return the part of one expert of a tensor (E, ...), stored whole or by expert."""
        if name not in self.stacks:
            return self.read(name)[number]
        return np.concatenate([self.read(each) for each in self.stacks[name][number]])

    def matrices(self, name: str) -> Iterator[list[NDArray[Any]]]:
        """Yield for each expert of a tensor (E, O, I) what the files have of it, in order of O."""
        if name in self.stacks:
            yield from ([self.read(part) for part in parts] for parts in self.stacks[name])
        else:
            yield from ([W_OI] for W_OI in self.read(name))


def model_weights(model: PreTrainedModel, folder: Path) -> ModelWeights:
    """Open the weights of `folder`.

    Raises:
        ModelError: M005, M002 or M003, as `WeightFolder`.
    """
    stored = WeightFolder(folder)
    names, stacks = dict[str, str](), dict[str, list[list[str]]]()
    if any(experts_of(model)):
        names, stacks = _as_modelled(model, stored.tensors)
    tensors = {**stored.tensors, **{name: stored.tensors[tensor] for name, tensor in names.items()}}
    for name, experts in stacks.items():
        parts = [stored.tensors[each] for each in experts[0]]
        shape = (len(experts), sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        tensors[name] = TensorInfo(parts[0].dtype, shape)

    def read(name: str) -> NDArray[Any]:
        if name in stacks:
            return np.stack([weights.expert(name, each) for each in range(len(stacks[name]))])
        return stored.read(names.get(name, name))

    weights = ModelWeights(folder, tensors, stored.where, read, stacks=stacks)
    return weights


def _as_modelled(
    model: PreTrainedModel, tensors: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, list[list[str]]]]:
    """Return parameter -> tensor of those that have another name, and the stacks."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    renames = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    # A stack has the experts' tensors, or first those whose rows follow one another, joined.
    joined = ([MergeModulelist], [MergeModulelist, Concatenate])
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    joins = [rule for rule in converters if [type(op) for op in rule.operations] in joined]
    order = [source for rule in joins for source in rule.source_patterns]
    names, found = dict[str, str](), dict[str, dict[str, list[str]]]()
    for tensor in sorted(tensors, key=dot_natural_key):
        name, source = rename_source_key(tensor, renames, joins)
        if source is not None:
            found.setdefault(name, {}).setdefault(source, []).append(tensor)
        elif name != tensor:
            names[name] = tensor
    stacks = {
        name: [
            list(parts) for parts in zip(*(by[s] for s in sorted(by, key=order.index)), strict=True)
        ]
        for name, by in found.items()
        if len({len(tensors) for tensors in by.values()}) == 1
    }
    return names, stacks


def experts_of(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose loop over experts is transformers' `use_experts_implementation`."""
    return ((path, m) for path, m in model.named_modules() if hasattr(m, "is_concatenated"))


def read_by_expert(model: PreTrainedModel, weights: ModelWeights) -> None:
    """Let the experts of `model` be read from the files, each when a token has chosen it."""
    experts = list(experts_of(model))
    for path, module in experts:
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 3:
                delattr(module, leaf)
                setattr(module, leaf, _Experts(weights, f"{path}.{leaf}"))
    if experts:
        model.set_experts_implementation("eager")


PACKED = "vox_packed"
"""Name of the loop over quantised experts (quantised.py), for transformers."""
_BY_ROW = "vox_rows"


@contextmanager
def row_by_row(model: PreTrainedModel) -> Iterator[None]:
    """Compute the experts of one token at a time, so that its neighbours change no bit."""
    if not any(experts_of(model)):
        yield
        return
    import torch
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

    own = model.config._experts_implementation
    of_a_row = ALL_EXPERTS_FUNCTIONS[own] if own == PACKED else batched_mm_experts_forward

    def by_row(self: nn.Module, *given_KX: torch.Tensor) -> torch.Tensor:
        rows = zip(*(each.split(1) for each in given_KX), strict=True)
        return torch.cat([of_a_row(self, *row) for row in rows])

    ALL_EXPERTS_FUNCTIONS.register(_BY_ROW, by_row)
    model.set_experts_implementation(_BY_ROW)
    try:
        yield
    finally:
        model.set_experts_implementation(own)


class _Experts:
    """Stands for a parameter (E, ...) in the loop over the experts that tokens have chosen."""

    def __init__(self, weights: ModelWeights, name: str) -> None:
        self._weights, self._name = weights, name

    def __getitem__(self, number: torch.Tensor) -> torch.Tensor:
        return float32(self._weights.expert(self._name, int(number)))
