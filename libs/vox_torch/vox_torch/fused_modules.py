"""Replace norms and feed-forwards of transformers by modules that save fewer activations.

    RmsNorm   x / rms(x) * weight, keeping x and one number a token
    Gated     act(gate) * up, keeping gate and up alone; LoRA of the next layer recomputes it

torch's autograd would save every intermediate result, in float32 where a norm is widened. The
results are those of transformers' modules up to the order of rounding.

A table lists the classes that these functions reproduce; tests compare each entry with the
original, on weights of realistic size. A module of any other class, subclasses included, keeps its
own forward. Before its first step a run compares the result with transformers (reference_check.py).

This module imports torch; import it lazily.

Shape legend: X tokens, in whatever dimensions; H width of a norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vox_torch.arrays import at_least_float32
from vox_torch.lora import recomputing

_CHUNK_ELEMENTS = 2**18
"""What a norm has in float32 at once: 1 MiB, which stays in a core's cache."""


class RmsNorm(torch.autograd.Function):
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` (Zhang & Sennrich, arXiv:1910.07467).

    `late`: multiply by the weight after rounding to the dtype of x (Llama), not before (Gemma). The
    weight's gradient is summed in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_H: torch.Tensor, eps: float, late: bool
    ) -> torch.Tensor:
        x_XH = x.reshape(-1, x.shape[-1])
        y_XH, scale_X1 = torch.empty_like(x_XH), _column(x_XH)
        for at in _chunks(x_XH):
            wide = at_least_float32(x_XH[at])
            square = torch.linalg.vector_norm(wide, dim=1, keepdim=True).square_()
            torch.rsqrt(square.div_(wide.shape[1]).add_(eps), out=scale_X1[at])
            unit = wide * scale_X1[at]
            torch.mul(unit.to(x.dtype) if late else unit, weight_H, out=y_XH[at])
        ctx.save_for_backward(x_XH, weight_H, scale_X1)
        return y_XH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x_XH, weight_H, scale_X1 = ctx.saved_tensors
        g_XH = g.reshape(x_XH.shape)
        gradient_XH = torch.empty_like(x_XH)
        gradient_H = scale_X1.new_zeros(len(weight_H)) if ctx.needs_input_grad[1] else None
        for at in _chunks(x_XH):
            unit = x_XH[at] * scale_X1[at]
            if gradient_H is not None:
                gradient_H += (g_XH[at] * unit).sum(dim=0)
            g_unit = at_least_float32(g_XH[at] * weight_H)
            along = (g_unit * unit).mean(dim=1, keepdim=True)
            torch.mul(g_unit.addcmul_(unit, along, value=-1), scale_X1[at], out=gradient_XH[at])
        of_weight = None if gradient_H is None else gradient_H.to(weight_H.dtype)
        return gradient_XH.view(g.shape), of_weight, None, None


def _column(x_XH: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x_XH.dtype, torch.float32)
    return torch.empty((len(x_XH), 1), dtype=wide, device=x_XH.device)


def _chunks(x_XH: torch.Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // x_XH.shape[1]) if x_XH.is_cpu else max(1, len(x_XH))
    return (slice(start, start + size) for start in range(0, len(x_XH), size))


class Gated(torch.autograd.Function):
    """`silu(gate) * up` (Shazeer, arXiv:2002.05202), or with `gelu_tanh` instead of silu."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.tanh = tanh
        return _gated(gate, up, tanh=tanh)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        g_up = _activated(gate, tanh=ctx.tanh).mul_(g)
        if ctx.tanh:
            return torch.ops.aten.gelu_backward(g * up, gate, approximate="tanh"), g_up, None
        return torch.ops.aten.silu_backward(g * up, gate), g_up, None


def _gated(gate: torch.Tensor, up: torch.Tensor, *, tanh: bool) -> torch.Tensor:
    return _activated(gate, tanh=tanh).mul_(up)


def _activated(gate: torch.Tensor, *, tanh: bool) -> torch.Tensor:
    return functional.gelu(gate, approximate="tanh") if tanh else functional.silu(gate)


_SCALED = {"Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Granite", "SmolLM3"}
"""Families whose norm is `weight * unit.to(dtype)`: rounded first, then scaled."""

_CENTRED = {"Gemma", "Gemma2", "Gemma3", "Qwen3_5"}
"""Families whose norm is `(unit * (1 + weight)).to(dtype)`, in float32 until the end."""

_GATED = (_SCALED | _CENTRED) - {"Phi3"}
"""Families whose feed-forward is `down_proj(act(gate_proj(x)) * up_proj(x))`."""

_TANH = {"SiLUActivation": False, "SiLU": False, "GELUTanh": True}
"""Class of an activation that `Gated` computes -> whether it is the GELU with tanh."""


def fuse_modules(model: nn.Module) -> dict[str, int]:
    """Replace the modules of `model` that the table lists; return the number replaced by kind."""
    counts = {"norms": 0, "feed-forwards": 0}
    for path, module in list(model.named_modules()):
        if (fused := _fused(module)) is not None:
            model.set_submodule(path, fused)
            counts["norms" if isinstance(fused, FusedNorm) else "feed-forwards"] += 1
    return counts


def _fused(module: nn.Module) -> nn.Module | None:
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    family = kind.__name__.removesuffix("RMSNorm").removesuffix("MLP")
    if kind.__name__ == f"{family}RMSNorm" and family in _SCALED | _CENTRED:
        return FusedNorm(module, centred=family in _CENTRED)
    if kind.__name__ == f"{family}MLP" and family in _GATED:
        tanh = _TANH.get(type(module.act_fn).__name__)
        return None if tanh is None else FusedFeedForward(module, tanh)
    return None


class FusedNorm(nn.Module):
    """An RMS norm.

    Args:
        norm: the module to replace, with `weight` (H,) and an epsilon.
        centred: the weight is an offset from one.
    """

    def __init__(self, norm: nn.Module, *, centred: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight  # type: ignore[assignment]
        self.eps: float = norm.eps if centred else norm.variance_epsilon  # type: ignore[assignment]
        self.centred = centred

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cpu and not self.centred and x.dtype == self.weight.dtype:
            # One kernel each way; the product with the weight is rounded once, not twice.
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        weight_H = at_least_float32(self.weight) + 1 if self.centred else self.weight
        y: torch.Tensor = RmsNorm.apply(x, weight_H, self.eps, not self.centred)
        return y


class FusedFeedForward(nn.Module):
    """`down_proj(act(gate_proj(x)) * up_proj(x))` over the projections of another module.

    Args:
        module: has the three projections, with or without adapters.
        tanh: the activation is the GELU with tanh; else it is SiLU.
    """

    def __init__(self, module: nn.Module, tanh: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = module.gate_proj, module.up_proj
        self.down_proj = module.down_proj
        self.tanh = tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        product = Gated.apply(gate, up, self.tanh)
        return recomputing(self.down_proj, product, partial(_gated, tanh=self.tanh), gate, up)
