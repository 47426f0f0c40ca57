"""Replace the forward of PEFT's LoRA layers by one autograd function.

PEFT defines structure and names; only layers that compute exactly `x W^T + scale * (x A^T) B^T` get
another forward. Layers with dropout or DoRA, and those whose base is no plain linear layer, keep
PEFT's. Generation has a forward of its own (lora_rows.py).

Shape legend: X tokens, I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from peft.tuners.lora import Linear
    from torch import nn


def fuse(model: nn.Module) -> dict[str, str | None]:
    """Replace the forward of every layer for the adapters that allow it; call it again after an
    adapter was added or removed.

    Returns:
        The path of each layer with the selected adapter; None if it was fused, else the reason why
        not.
    """
    reasons = {}
    for path, layer in _layers(model).items():
        why_not = {key: _reason_why_not(layer, key) for key in layer.lora_A}
        fused = frozenset(key for key, reason in why_not.items() if reason is None)
        vars(layer).pop("forward", None)
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
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if type(layer) is not Linear or not isinstance(layer.base_layer, nn.Linear | Conv1D):
        return f"{type(layer).__name__} on {type(layer.base_layer).__name__}"
    if not isinstance(layer.lora_dropout[key], nn.Identity):
        return "dropout"
    if layer.use_dora[key]:
        return "DoRA"
    if layer.lora_bias[key]:
        return "a bias of the adapter"
    if weight_of(layer.base_layer)().dtype != layer.lora_A[key].weight.dtype:
        return "an adapter in another dtype than the base"
    return None


def _forward(
    layer: Linear,
    weight: Callable[[], torch.Tensor],
    fused: frozenset[str],
    x: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    from vox_torch.functions import LoraLinear, scaled
    from vox_torch.prepacked import PrepackedLinear

    key = _selected(layer)
    if key is None:
        return layer.base_layer(x)
    if key not in fused or x.dtype != layer.lora_A[key].weight.dtype:
        return type(layer).forward(layer, x)  # which casts
    base, x_XI = layer.base_layer, x.reshape(-1, x.shape[-1])
    A_RI, B_OR, scale = layer.lora_A[key].weight, layer.lora_B[key].weight, layer.scaling[key]
    if isinstance(base, PrepackedLinear):
        y_XO = base.onto(scaled(x_XI @ A_RI.T, B_OR.T, scale), x_XI)
        y_XO = y_XO if base.bias is None else y_XO.add_(base.bias)
    else:
        y_XO = LoraLinear.apply(x_XI, A_RI, B_OR, weight, base.bias, scale)
    return y_XO.view(*x.shape[:-1], y_XO.shape[-1])


def plus_product(layer: nn.Module, y_XO: torch.Tensor, x_XI: torch.Tensor) -> torch.Tensor:
    """Return `y + x W^T` with the layer's weight, rounded once."""
    import torch

    from vox_torch.prepacked import PrepackedLinear

    if isinstance(layer, PrepackedLinear):
        return layer.onto(y_XO, x_XI)
    return torch.addmm(y_XO, x_XI, weight_of(layer)().T)


def weight_of(layer: nn.Module) -> Callable[[], torch.Tensor]:
    """Return the layer's weight (O, I), dequantised on each call if it is quantised."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, Conv1D):
        return lambda: layer.weight.T
    return lambda: layer.weight
