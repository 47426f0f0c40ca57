"""Linear layers whose weight lies in oneDNN's own layout, for models that do not train; as
copies, for a model that trains, while it generates.

torch passes oneDNN a plain matrix, which is rearranged on each call or read in an order that caches
do not like. A weight that is rearranged once is multiplied with few tokens in half the time, and
takes the same memory, if no longer as a map of its file. In bfloat16 products have the same bits.
In float32 torch would call MKL: the order of the sums is another, and hardly depends on the number
of tokens. Layers with the same input are one product.

A plain float32 weight, which may train or be an embedding's too, is multiplied by oneDNN as it is
while rows are generated, in 0.5 to 0.9 of MKL's time with two threads.

`torch.ops.mkldnn` is what torch.compile calls on a CPU. A torch without these operations keeps
plain weights; so does bfloat16 on a processor without its instructions.

This module imports torch; import it lazily.

Shape legend: X tokens, I input features, O output features of a layer, S of all layers of a
product.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from vox_torch.memory import no_holes

_onednn = torch.ops.mkldnn
_NAMES = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")


@dataclass
class _Latest:
    """The product of a model that was computed last, and the parts that no layer has taken yet."""

    of: Product | None = None
    x: torch.Tensor | None = None
    owner: object = None
    parts: dict[int, torch.Tensor] = field(default_factory=dict)


class Product:
    """Linear layers with the same input, such as query, key and value, as one product.

    The first of them that is called computes the parts of all. For few tokens, waking the threads
    takes longer than a product.

    Args:
        weight_SI: of all layers, side by side.
        latest: shared by the products of a model, so at most one keeps parts that are not taken.

    Attributes:
        sizes: output features of each layer.
        adapted: PEFT's layers over these, by their number among them.
    """

    def __init__(
        self, layers: Sequence[PrepackedLinear], weight_SI: torch.Tensor, latest: _Latest
    ) -> None:
        self._packed_SI = _onednn._reorder_linear_weight(weight_SI, None)
        self._biases = [each.bias for each in layers]
        self._bias_S = None if self._biases[0] is None else torch.cat(self._biases)
        self.sizes = [each.out_features for each in layers]
        self.adapted: dict[int, Any] = {}
        self._latest = latest
        for number, layer in enumerate(layers):
            layer.product, layer.number = self, number

    def part(
        self,
        number: int,
        x: torch.Tensor,
        compute: Callable[[], torch.Tensor] | None = None,
        owner: object = None,
    ) -> torch.Tensor:
        """Return the part of a layer.

        Args:
            compute: returns the sum of `self(x)` and the adapters' parts, of all layers.
            owner: equal for each layer of one such computation; parts of another are not used.
        """
        last = self._latest
        usable = last.of is self and last.x is x and owner in (None, last.owner)
        if not usable or number not in last.parts:
            last.parts = {}  # another product's, before there are more
            parts = (compute() if compute else self(x)).split(self.sizes, dim=-1)
            last.of, last.x, last.owner, last.parts = self, x, owner, dict(enumerate(parts))
        part = last.parts.pop(number)
        if not last.parts:
            last.x = None
        return part

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x W^T + b` of all layers, without a gradient."""
        y: torch.Tensor = _onednn._linear_pointwise(
            x, self._packed_SI, self._bias_S, "none", [], ""
        )
        return y

    def onto(
        self, update_XS: torch.Tensor, x_XI: torch.Tensor, adapted: Collection[int]
    ) -> torch.Tensor:
        """Return `update + x W^T` of all layers, rounded once.

        Args:
            update_XS: zeros for layers that are not adapted; their bias is added to it.
            adapted: numbers of layers whose bias comes later (`add_bias`).
        """
        self.add_bias(update_XS, {*range(len(self.sizes))} - {*adapted})
        sum_XS: torch.Tensor = _onednn._linear_pointwise.binary(
            x_XI, update_XS, self._packed_SI, None, "add"
        )
        return sum_XS

    def add_bias(self, y_XS: torch.Tensor, numbers: Collection[int]) -> None:
        """Add the bias of some layers in place."""
        if self._bias_S is not None:
            parts = y_XS.split(self.sizes, dim=-1)
            for number in numbers:
                parts[number].add_(self._biases[number])

    def clear(self) -> None:
        """Forget computed parts and PEFT's layers, which know this product in turn."""
        self._latest.of = self._latest.x = self._latest.owner = None
        self._latest.parts = {}
        self.adapted.clear()

    def weight(self, number: int) -> torch.Tensor:
        """Return the weight (O, I) of a layer in torch's layout; it is unpacked with the others."""
        plain_SI: torch.Tensor = self._packed_SI.to_dense()
        return plain_SI.split(self.sizes)[number]


class PrepackedLinear(nn.Linear):
    """A frozen linear layer over its part of a prepacked product.

    PEFT and others see a linear layer: reading `weight` unpacks it.
    """

    product: Product
    number: int

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.dtype = layer.weight.dtype
        self.bias = layer.bias

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight (O, I) in torch's layout."""
        return self.product.weight(self.number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x W^T + b`, without a gradient."""
        return self.product.part(self.number, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """Return a layer in torch's layout: PEFT copies a module that an adapter has whole."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight.clone(), requires_grad=False)
        layer.bias = copy.deepcopy(self.bias, memo)
        return layer


_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one module that usually have the same input."""


def prepack(model: nn.Module) -> None:
    """Replace the linear layers of `model`, which is on a CPU and will not train.

    A head that shares its weight with the embedding stays: it would need a second copy.
    """
    with no_holes():
        for parent, packed in _packed(model):  # no weights are held twice but those of one product
            for name, layer in packed.items():
                setattr(parent, name, layer)


def copies(model: nn.Module) -> dict[nn.Module, PrepackedLinear]:
    """Return the linear layers that `prepack` would replace, PEFT's bases among them, each with a
    packed copy. Copies do not follow a weight that changes."""
    return {
        _base(parent.get_submodule(name)): layer
        for parent, packed in _packed(model)
        for name, layer in packed.items()
    }


def _packed(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, PrepackedLinear]]]:
    """Pack the linear layers of a model. Before each product, yield their parent, and by name the
    layers that will take their place: a caller that replaces them frees the weights."""
    shared = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    paths = [path for path, module in model.named_modules() if not _is_adapters(module)]
    latest = _Latest()
    for parent in map(model.get_submodule, paths):
        for names in _products(parent, shared):
            layers = [_base(parent.get_submodule(name)) for name in names]
            weights = [each.weight.detach() for each in layers]
            packed = [PrepackedLinear(each) for each in layers]
            del layers
            yield parent, dict(zip(names, packed, strict=True))
            weight_SI = weights[0] if len(weights) == 1 else torch.cat(weights)
            del weights
            Product(packed, weight_SI, latest)


def _products(parent: nn.Module, shared: set[int]) -> list[tuple[str, ...]]:
    """Return the names of the layers of each product."""
    forms = {
        name: (layer.in_features, layer.bias is None)
        for name, layer in ((name, _base(child)) for name, child in parent.named_children())
        if _is_multiplied(layer) and id(layer.weight) not in shared
    }
    several = [each for each in _SAME_INPUT if len({forms.get(name, name) for name in each}) == 1]
    alone = forms.keys() - {name for names in several for name in names}
    return [*several, *((name,) for name in forms if name in alone)]


def _base(layer: nn.Module) -> Any:
    """Return the base of PEFT's layer, or the layer."""
    return getattr(layer, "base_layer", layer)


def _is_adapters(module: nn.Module) -> bool:
    """Whether linear layers in a module are adapters' (`lora_A`), or trained in place of others, or
    the base of PEFT's layer, which its parent has."""
    return isinstance(module, nn.ModuleDict) or hasattr(module, "base_layer")


def quick_forwards(model: nn.Module) -> dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return forwards, without gradients, of the linear layers of `model` that torch multiplies by
    MKL. Their weights may train, so they stay as they are."""
    return {
        layer: partial(_product, layer)
        for layer in model.modules()
        if _is_multiplied(layer) and layer.weight.dtype == torch.float32
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
        and "forward" not in vars(layer)
        and type(layer.weight.data) is torch.Tensor  # a base that is split has others
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
