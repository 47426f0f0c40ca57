"""Replace the forward of PEFT's LoRA layers: one autograd function, and a fast decoding step.

PEFT defines structure and names; only layers that compute exactly `x W^T + scale * (x A^T) B^T` get
another forward. Layers with dropout or DoRA, and those whose base is no plain linear layer, keep
PEFT's. `fuse_decoding` is for an adapter that no longer changes: a single row of input skips
autograd and reuses precomputed values.

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


_DORA = "DoRA"
Forward = Callable[..., "torch.Tensor"]


def fuse(model: PeftModel) -> dict[str, str | None]:
    """Replace the forward of every layer that allows it.

    Returns:
        The path of each layer with an adapter; None if it was fused, else the reason why not.
    """
    layers = _layers(model)
    reasons = {path: _reason_why_not(layer) for path, layer in layers.items()}
    for path, layer in layers.items():
        if reasons[path] is None:
            layer.forward = partial(_forward, layer, weight_of(layer.base_layer))
    return reasons


def fuse_decoding(model: PeftModel) -> None:
    """Replace the forward of LoRA and DoRA layers for single rows; A and B must not change
    after."""
    import torch

    with torch.no_grad():
        for layer in _layers(model).values():
            if _reason_why_not(layer) in (None, _DORA):
                layer.forward = _decoding(layer, layer.forward)


def _layers(model: PeftModel) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {path: each for path, each in model.named_modules() if isinstance(each, LoraLayer)}


def _reason_why_not(layer: nn.Module) -> str | None:
    from peft.tuners.lora import Linear
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if type(layer) is not Linear or not isinstance(layer.base_layer, nn.Linear | Conv1D):
        return f"{type(layer).__name__} on {type(layer.base_layer).__name__}"
    if not isinstance(layer.lora_dropout["default"], nn.Identity):
        return "dropout"
    if layer.use_dora["default"]:
        return _DORA
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


def _decoding(layer: Linear, forward: Forward) -> Forward:
    """Wrap `forward` with a path for single rows that adds the base last (docs/adr/0014).

    On a CPU the narrow products are in float32: their operands fit in a cache, and the bfloat16
    product of oneDNN takes 14 microseconds whatever its size, that of the BLAS 2.
    """
    import torch

    linear, addmm = torch.nn.functional.linear, torch.addmm
    base = layer.base_layer
    weight, bias_O = weight_of(base), base.bias
    W_IO = weight().T if "weight" in base._parameters else None  # else computed on each use
    A_RI, B_OR = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    dtype, features = A_RI.dtype, A_RI.shape[1]
    narrow = torch.promote_types(dtype, torch.float32) if A_RI.is_cpu else dtype
    gain_O = _gain(layer, weight()) if layer.use_dora["default"] else None
    A_RI, B_OR = A_RI.to(narrow), (B_OR.to(narrow) * layer.scaling["default"])

    def decode(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.numel() != features or x.dtype != dtype:
            return forward(x, *args, **kwargs)
        x_1I = x.reshape(1, features)
        update_1O = linear(linear(x_1I.to(narrow), A_RI), B_OR).to(dtype)
        y_1O = addmm(update_1O, x_1I, weight().T if W_IO is None else W_IO)
        if gain_O is not None:
            y_1O.mul_(gain_O)
        if bias_O is not None:
            y_1O.add_(bias_O)
        return y_1O.view(*x.shape[:-1], -1)

    return decode


def _gain(layer: Linear, W_OI: torch.Tensor) -> torch.Tensor:
    """Return DoRA's magnitude over the row norms of `W + scale * B A` (Liu et al.,
    arXiv:2402.09353)."""
    import torch

    from vox_torch.arrays import at_least_float32

    A_RI, B_OR = (at_least_float32(each["default"].weight) for each in (layer.lora_A, layer.lora_B))
    whole_OI = torch.addmm(at_least_float32(W_OI), B_OR, A_RI, alpha=layer.scaling["default"])
    magnitude_O = at_least_float32(layer.lora_magnitude_vector["default"].weight)
    return (magnitude_O / whole_OI.norm(dim=1)).to(W_OI.dtype)


def weight_of(layer: nn.Module) -> Callable[[], torch.Tensor]:
    """Return the layer's weight (O, I), dequantised on each call if it is quantised."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, Conv1D):
        return lambda: layer.weight.T
    return lambda: layer.weight
