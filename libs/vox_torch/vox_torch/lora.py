"""The adapter's arithmetic in one autograd function, under PEFT's own modules.

PEFT stays the owner of structure and names; what changes is the forward of the layers that compute
`x W^T + scale * (x A^T) B^T` and nothing else. Layers with dropout or DoRA, and those whose base is
no plain linear layer, keep PEFT's own path.

Shape legend: X tokens, I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from peft.tuners.lora import Linear
    from torch import nn


def fuse(model: PeftModel) -> dict[str, str | None]:
    """Swap the forward of every layer that allows it.

    Returns:
        The path of each layer with an adapter; None if it was swapped, else the reason why not.
    """
    from peft.tuners.lora import LoraLayer

    layers = {path: each for path, each in model.named_modules() if isinstance(each, LoraLayer)}
    reasons = {path: _reason_why_not(layer) for path, layer in layers.items()}
    for path, layer in layers.items():
        if reasons[path] is None:
            layer.forward = partial(_forward, layer, weight_of(layer.base_layer))
    return reasons


def _reason_why_not(layer: nn.Module) -> str | None:
    from peft.tuners.lora import Linear
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if type(layer) is not Linear or not isinstance(layer.base_layer, nn.Linear | Conv1D):
        return f"{type(layer).__name__} on {type(layer.base_layer).__name__}"
    if not isinstance(layer.lora_dropout["default"], nn.Identity):
        return "dropout"
    if layer.use_dora["default"]:
        return "DoRA"
    if layer.lora_bias["default"]:
        return "a bias of the adapter"
    if weight_of(layer.base_layer)().dtype != layer.lora_A["default"].weight.dtype:
        return "an adapter in another dtype than the base"
    return None


def _forward(
    layer: Linear, weight: Callable[[], torch.Tensor], x: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    from vox_torch.functions import LoraLinear

    if x.dtype != layer.lora_A["default"].weight.dtype:
        return type(layer).forward(layer, x)  # which casts
    x_XI = x.reshape(-1, x.shape[-1])
    y_XO: torch.Tensor = LoraLinear.apply(
        x_XI,
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
        weight,
        layer.base_layer.bias,
        layer.scaling["default"],
    )
    return y_XO.view(*x.shape[:-1], y_XO.shape[-1])


def weight_of(layer: nn.Module) -> Callable[[], torch.Tensor]:
    """The layer's weight (O, I), read each time it is asked for: a quantised one is computed."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, Conv1D):
        return lambda: layer.weight.T
    return lambda: layer.weight
