"""Fused elementwise functions of a layer, with fewer memory passes and fewer saved activations.

    RmsNorm   x / rms(x) * weight, keeping x and one number a token
    Gated     act(gate) * up, keeping gate and up alone

torch's autograd would save every intermediate result, in float32 where a norm is widened. The
results are those of transformers' modules up to the order of rounding. fused_modules.py lists the
modules that use these functions.

Shape legend: X tokens, in whatever dimensions; H width of a norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from vox_torch.arrays import at_least_float32

_CHUNK_ELEMENTS = 2**18
"""What a norm has in float32 at once: 1 MiB, which stays in a core's cache."""


class RmsNorm(torch.autograd.Function):
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` (Zhang & Sennrich, arXiv:1910.07467).

    The weight is frozen. `late`: multiply by the weight after rounding to the dtype of x (Llama),
    not before (Gemma).
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
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x_XH, weight_H, scale_X1 = ctx.saved_tensors
        g_XH = g.reshape(x_XH.shape)
        gradient_XH = torch.empty_like(x_XH)
        for at in _chunks(x_XH):
            unit = x_XH[at] * scale_X1[at]
            g_unit = at_least_float32(g_XH[at] * weight_H)
            along = (g_unit * unit).mean(dim=1, keepdim=True)
            torch.mul(g_unit.addcmul_(unit, along, value=-1), scale_X1[at], out=gradient_XH[at])
        return gradient_XH.view(g.shape), None, None, None


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
        return _activated(gate, tanh=tanh).mul_(up)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        g_up = _activated(gate, tanh=ctx.tanh).mul_(g)
        if ctx.tanh:
            return torch.ops.aten.gelu_backward(g * up, gate, approximate="tanh"), g_up, None
        return torch.ops.aten.silu_backward(g * up, gate), g_up, None


def _activated(gate: torch.Tensor, *, tanh: bool) -> torch.Tensor:
    return functional.gelu(gate, approximate="tanh") if tanh else functional.silu(gate)
