"""Linear layers whose weight lies in oneDNN's own layout, for models that do not train.

torch passes oneDNN a plain matrix, which is rearranged on each call or read in an order that caches
do not like. A weight that is rearranged once is multiplied with few tokens in half the time, and
takes the same memory, if no longer as a map of its file. In bfloat16 products have the same bits.
In float32 torch would call MKL: the order of the sums is another, and hardly depends on the number
of tokens.

A plain float32 weight, which may train or be an embedding's too, is multiplied by oneDNN as it is
while rows are generated, in 0.5 to 0.9 of MKL's time with two threads.

`torch.ops.mkldnn` is what torch.compile calls on a CPU. A torch without these operations keeps
plain weights; so does bfloat16 on a processor without its instructions.

This module imports torch; import it lazily.

Shape legend: X tokens, I input features, O output features.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from vox_torch.memory import no_holes

_onednn = torch.ops.mkldnn
_NAMES = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")


class PrepackedLinear(nn.Linear):
    """A frozen linear layer over a prepacked weight.

    PEFT and others see a linear layer: reading `weight` unpacks it.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.dtype = layer.weight.dtype
        self._packed_OI = _onednn._reorder_linear_weight(layer.weight.detach(), None)
        self.bias = layer.bias

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight (O, I) in torch's layout."""
        plain_OI: torch.Tensor = self._packed_OI.to_dense()
        return plain_OI

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x W^T + b`, without a gradient."""
        y: torch.Tensor = _onednn._linear_pointwise(x, self._packed_OI, self.bias, "none", [], "")
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """Return a layer in torch's layout: PEFT copies a module that an adapter has whole."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        layer.bias = copy.deepcopy(self.bias, memo)
        return layer

    def onto(self, y_XO: torch.Tensor, x_XI: torch.Tensor) -> torch.Tensor:
        """Return `y + x W^T`, rounded once."""
        sum_XO: torch.Tensor = _onednn._linear_pointwise.binary(
            x_XI, y_XO, self._packed_OI, None, "add"
        )
        return sum_XO


def prepack(model: nn.Module) -> None:
    """Replace the linear layers of `model`, which is on a CPU and will not train.

    A head that shares its weight with the embedding stays: it would need a second copy.
    """
    shared = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    paths = [
        path
        for path, layer in model.named_modules()
        if _is_multiplied(layer) and id(layer.weight) not in shared
    ]
    with no_holes():
        for path in paths:  # no weight is held twice but one
            model.set_submodule(path, PrepackedLinear(model.get_submodule(path)))


def quick_forwards(model: nn.Module) -> dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return forwards, without gradients, of the linear layers of `model` that torch multiplies by
    MKL. Their weights may train, so they stay as they are."""
    return {
        layer: partial(_product, layer)
        for layer in model.modules()
        if _is_multiplied(layer)
        and layer.weight.dtype == torch.float32
        and "forward" not in vars(layer)
    }


def _product(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if not _is_quick(x, layer.weight):
        return nn.Linear.forward(layer, x)
    y: torch.Tensor = _onednn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
    return y


def onto(y_XO: torch.Tensor, x_XI: torch.Tensor, W_OI: torch.Tensor) -> torch.Tensor:
    """Return `y + x W^T`, rounded once, without a gradient."""
    if not _is_quick(x_XI, W_OI):
        return torch.addmm(y_XO, x_XI, W_OI.T)
    sum_XO: torch.Tensor = _onednn._linear_pointwise.binary(x_XI, y_XO, W_OI, None, "add")
    return sum_XO


def _is_quick(x: torch.Tensor, W_OI: torch.Tensor) -> bool:
    """Whether oneDNN multiplies them faster as they are; while a base is split, parts are not."""
    plain = type(W_OI.data) is torch.Tensor and W_OI.is_cpu and not torch.is_grad_enabled()
    return plain and x.dtype == W_OI.dtype == torch.float32 and torch.float32 in faster()


def _is_multiplied(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(layer) is nn.Linear
        and layer.weight.is_cpu
        and layer.weight.dtype in faster()
        and (layer.bias is None or layer.bias.is_contiguous())
    )


@functools.cache
def faster() -> frozenset[torch.dtype]:
    """Return the dtypes that oneDNN multiplies faster than torch's other libraries."""
    if not all(hasattr(_onednn, name) for name in _NAMES):
        return frozenset()
    bf16 = [torch.bfloat16] if _onednn._is_mkldnn_bf16_supported() else []
    return frozenset([*bf16, *([torch.float32] if torch.backends.mkl.is_available() else [])])
