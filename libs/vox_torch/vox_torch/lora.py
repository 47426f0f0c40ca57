"""Replace the forward of PEFT's LoRA layers by one autograd function.

PEFT defines structure and names; only layers that compute exactly `x W^T + scale * (x A^T) B^T` get
another forward. Layers with dropout or DoRA, and those whose base is no plain linear layer, keep
PEFT's. Several adapters, each with tokens of its own, can share the product with the base
(`Sharing`). Generation has a forward of its own (lora_rows.py).

This module imports torch; import it lazily.

Shape legend: X tokens, I input features, O output features, S of all layers of a product, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from vox_torch.functions import LoraLinear, LoraLinears, scaled
from vox_torch.prepacked import PrepackedLinear, Product

if TYPE_CHECKING:
    from peft.tuners.lora import Linear
    from transformers import PreTrainedModel


def fuse(model: nn.Module) -> dict[str, str | None]:
    """Replace the forward of every layer for the adapters that allow it; call it again after an
    adapter was added or removed.

    Returns:
        The path of each layer with the selected adapter; None if it was fused, else the reason why
        not.
    """
    reasons = {}
    for packed in (each for each in model.modules() if isinstance(each, PrepackedLinear)):
        packed.product.adapted.clear()
    for path, layer in _layers(model).items():
        why_not = {key: _reason_why_not(layer, key) for key in layer.lora_A}
        fused = frozenset(key for key, reason in why_not.items() if reason is None)
        vars(layer).pop("forward", None)
        if isinstance(base := layer.base_layer, PrepackedLinear):
            base.product.adapted[base.number] = layer
        if fused:
            layer.forward = partial(_forward, layer, weight_of(layer.base_layer), fused)
        if (key := _selected(layer)) is not None:
            reasons[path] = why_not[key]
    return reasons


def _layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {path: each for path, each in model.named_modules() if isinstance(each, LoraLayer)}


def _selected(layer: Any) -> str | None:
    """Return PEFT's name of the adapter that the layer computes with; None for the base alone."""
    if layer.disable_adapters:
        return None
    return next((key for key in layer.active_adapters if key in layer.lora_A), None)


def _reason_why_not(layer: nn.Module, key: str) -> str | None:
    from peft.tuners.lora import Linear
    from transformers.pytorch_utils import Conv1D

    if type(layer) is not Linear or not isinstance(layer.base_layer, nn.Linear | Conv1D):
        return f"{type(layer).__name__} on {type(layer.base_layer).__name__}"
    if not isinstance(layer.lora_dropout[key], nn.Identity):
        return "dropout"
    if layer.use_dora[key]:
        return "DoRA"
    if layer.lora_bias[key]:
        return "a bias of the adapter"
    base = layer.base_layer  # a packed one has `dtype`, since reading its weight would unpack it
    if (getattr(base, "dtype", None) or base.weight.dtype) != layer.lora_A[key].weight.dtype:
        return "an adapter in another dtype than the base"
    return None


def _forward(
    layer: Linear,
    weight: Callable[[], torch.Tensor],
    fused: frozenset[str],
    x: torch.Tensor,
    *_: Any,
    made: Sequence[Any] = (),
    **__: Any,
) -> torch.Tensor:
    key = _selected(layer)
    if key is None:
        return layer.base_layer(x)
    if key not in fused or x.dtype != layer.lora_A[key].weight.dtype:
        return type(layer).forward(layer, x)  # which casts
    base = layer.base_layer
    if isinstance(base, PrepackedLinear):
        return base.product.part(base.number, x, partial(_prepacked, base.product, key, x), key)
    A_RI, B_OR, scale = layer.lora_A[key].weight, layer.lora_B[key].weight, layer.scaling[key]
    x_XI = x.reshape(-1, x.shape[-1])
    y_XO = LoraLinear.apply(x_XI, A_RI, B_OR, weight, base.bias, scale, *made)
    return y_XO.view(*x.shape[:-1], y_XO.shape[-1])


def recomputing(
    layer: nn.Module, x: torch.Tensor, make: Callable[..., torch.Tensor], *sources: torch.Tensor
) -> torch.Tensor:
    """Return `layer(x)`. The backward pass of a fused layer recomputes x = make(*sources), where x
    has a gradient and the sources are saved for that anyway."""
    fused = getattr(vars(layer).get("forward"), "func", None) is _forward
    if not (fused and x.requires_grad):
        return cast("torch.Tensor", layer(x))
    made = (make, *(each.flatten(0, -2) for each in sources))
    return cast("torch.Tensor", layer(x, made=made))


def _prepacked(product: Product, key: str, x: torch.Tensor) -> torch.Tensor:
    """Return `x W^T + b` with the updates of an adapter, of all layers of a product."""
    x_XI = x.reshape(-1, x.shape[-1])
    update_XS = x_XI.new_zeros(len(x_XI), sum(product.sizes))
    parts, adapted = update_XS.split(product.sizes, dim=1), []
    for number, layer in product.adapted.items():
        if _selected(layer) == key and _reason_why_not(layer, key) is None:
            A_RI, B_OR = layer.lora_A[key].weight, layer.lora_B[key].weight
            parts[number].copy_(scaled(x_XI @ A_RI.T, B_OR.T, layer.scaling[key]))
            adapted.append(number)
    y_XS = product.onto(update_XS, x_XI, adapted)
    product.add_bias(y_XS, adapted)
    return y_XS.view(*x.shape[:-1], -1)


class Sharing:
    """The layers of a model as they are now, for passes of several adapters."""

    def __init__(self, model: PreTrainedModel) -> None:
        from peft.utils import ModulesToSaveWrapper

        layers, body = _layers(model).values(), {*model.base_model.modules()}
        self._body = [each for each in layers if each in body]
        self._others = [each for each in layers if each not in body]
        self._whole = [each for each in model.modules() if isinstance(each, ModulesToSaveWrapper)]
        self._fits: dict[str | None, bool] = {None: False}

    def fits(self, key: str | None) -> bool:
        """Whether the adapter of this PEFT name can be computed beside others: all of its layers
        are fused, and it has no whole modules."""
        if key not in self._fits:
            layers = (each for each in (*self._body, *self._others) if key in each.lora_A)
            whole = any(key in wrapper.modules_to_save for wrapper in self._whole)
            self._fits[key] = not (whole or any(_reason_why_not(each, str(key)) for each in layers))
        return self._fits[key]

    def only_body(self, key: str | None) -> bool:
        """Whether the adapter has no layer outside of the body, such as the head."""
        return not any(key in each.lora_A for each in self._others)

    @contextmanager
    def computing(
        self, shares: Sequence[tuple[str, int]]
    ) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
        """Compute the body with several adapters within the context, backward pass included.

        Args:
            shares: PEFT's names in the order of their tokens, each with its number of tokens.

        Yields:
            Parameter -> the leaf that gets its gradient.
        """
        leaves: dict[nn.Parameter, torch.Tensor] = {}

        def matrices(layer: Any, key: str) -> tuple[torch.Tensor, torch.Tensor]:
            base = layer.base_layer.weight
            if key not in layer.lora_A:
                return base.new_empty(0, layer.in_features), base.new_empty(layer.out_features, 0)
            A, B = layer.lora_A[key].weight, layer.lora_B[key].weight
            leaves.update((each, each.detach().requires_grad_()) for each in (A, B))
            return leaves[A], leaves[B]

        forwards: dict[nn.Module, Any] = {}
        for layer in self._body:
            given = [each for key, _ in shares for each in matrices(layer, key)]
            scales = [(count, layer.scaling.get(key, 0.0)) for key, count in shares]
            forwards[layer] = partial(_shared, layer.base_layer, scales, given)
        with replaced_forwards(forwards):
            yield leaves


def _shared(
    base: Any,
    shares: Sequence[tuple[int, float]],
    matrices: Sequence[torch.Tensor],
    x: torch.Tensor,
) -> torch.Tensor:
    x_XI = x.reshape(-1, x.shape[-1])
    y_XO = LoraLinears.apply(x_XI, weight_of(base), base.bias, shares, *matrices)
    return y_XO.view(*x.shape[:-1], y_XO.shape[-1])


def weight_of(layer: nn.Module) -> Callable[[], torch.Tensor]:
    """Return the layer's weight (O, I), dequantised on each call if it is quantised."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, Conv1D):
        return lambda: layer.weight.T
    return lambda: layer.weight


@contextmanager
def replaced_forwards(replaced: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Give modules another forward within the context."""
    before = {module: vars(module).get("forward") for module in replaced}
    try:
        for module, forward in replaced.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own
