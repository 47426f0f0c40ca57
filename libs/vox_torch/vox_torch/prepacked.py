"""Linear layers whose weight lies in oneDNN's own layout, for models that do not train.

torch passes oneDNN a plain matrix, which is rearranged on each call or read in an order that caches
do not like. A weight that is rearranged once is multiplied with few tokens in half the time, and
takes the same memory. In bfloat16 products have the same bits. In float32 torch would call MKL: the
order of the sums is another, and hardly depends on the number of tokens.

`torch.ops.mkldnn` is what torch.compile calls on a CPU. A torch without these operations keeps
plain weights; so does bfloat16 on a processor without its instructions.

This module imports torch; import it lazily.

Shape legend: X tokens, I input features, O output features.
"""

from __future__ import annotations

import copy
import functools
from functools import partial
from typing import Any

import torch
from torch import nn

from vox_torch.memory import no_holes

_onednn = torch.ops.mkldnn
_NAMES = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")


class PrepackedLinear(nn.Linear):
    """A frozen linear layer over a prepacked weight.

    PEFT and others see a linear layer: reading `weight` unpacks it.

    Args:
        shared: another module has the weight too, so it stays as it is.
    """

    def __init__(self, layer: nn.Linear, *, shared: bool = False) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        weight_OI = layer.weight.detach()
        self.dtype = weight_OI.dtype
        if not shared:
            weight_OI = _onednn._reorder_linear_weight(weight_OI, None)
        self._packed_OI = weight_OI
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
        layer.weight = nn.Parameter(self.weight.clone(), requires_grad=False)
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

    A head that shares its weight with the embedding is not rearranged, which would need a second
    copy. In float32 oneDNN multiplies it as it is, in a third of MKL's time for eight tokens.
    """
    dtypes = faster()
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    with no_holes():
        for path, layer in list(model.named_modules()):
            if type(layer) is nn.Linear and layer.weight.dtype in dtypes:
                shared = id(layer.weight) in embeddings
                if not shared or layer.weight.dtype == torch.float32:
                    model.set_submodule(path, PrepackedLinear(layer, shared=shared))


def quick_forwards(model: nn.Module) -> dict[nn.Module, Any]:
    """Return forwards, without gradients, of the linear layers of `model` that torch multiplies by
    MKL. Their weights may train, so they stay as they are."""
    if torch.float32 not in faster():
        return {}
    return {
        layer: partial(_product, layer)
        for layer in model.modules()
        if type(layer) is nn.Linear
        and type(layer.weight.data) is torch.Tensor  # not one part of a split weight
        and layer.weight.is_cpu
        and layer.weight.dtype == torch.float32
    }


def _product(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != layer.weight.dtype:
        return nn.Linear.forward(layer, x)
    y: torch.Tensor = _onednn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
    return y


def onto(y_XO: torch.Tensor, x_XI: torch.Tensor, W_OI: torch.Tensor) -> torch.Tensor:
    """Return `y + x W^T`, rounded once, without a gradient."""
    if y_XO.is_cpu and y_XO.dtype == torch.float32 and torch.float32 in faster():
        sum_XO: torch.Tensor = _onednn._linear_pointwise.binary(x_XI, y_XO, W_OI, None, "add")
        return sum_XO
    return torch.addmm(y_XO, x_XI, W_OI.T)


@functools.cache
def faster() -> set[torch.dtype]:
    """Return the dtypes that oneDNN multiplies faster than torch's other libraries."""
    if not all(hasattr(_onednn, name) for name in _NAMES):
        return set()
    bf16 = {torch.bfloat16} if _onednn._is_mkldnn_bf16_supported() else set[torch.dtype]()
    return bf16 | ({torch.float32} if torch.backends.mkl.is_available() else set())
