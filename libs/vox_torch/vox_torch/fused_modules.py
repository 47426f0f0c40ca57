"""Replace norms and feed-forwards of transformers by modules that save fewer activations.

A table lists the classes that the functions of elementwise.py reproduce; tests compare each entry
with the original, on weights of realistic size. A module of any other class, subclasses included,
keeps its own forward, and so does one that is trained itself. Before its first step a run compares
the result with transformers (reference_check.py).

This module imports torch; import it lazily.

Shape legend: X tokens, in whatever dimensions; H width of a norm.
"""

from __future__ import annotations

import torch
from torch import nn

from vox_torch.arrays import at_least_float32
from vox_torch.elementwise import Gated, RmsNorm

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
        trained = module.get_parameter("weight").requires_grad
        return None if trained else FusedNorm(module, centred=family in _CENTRED)
    if kind.__name__ == f"{family}MLP" and family in _GATED:
        tanh = _TANH.get(type(module.act_fn).__name__)
        return None if tanh is None else FusedFeedForward(module, tanh)
    return None


class FusedNorm(nn.Module):
    """An RMS norm with a frozen weight.

    Args:
        norm: the module to replace, with `weight` (H,) and an epsilon.
        centred: the weight is an offset from one.
    """

    def __init__(self, norm: nn.Module, *, centred: bool) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps: float = norm.eps if centred else norm.variance_epsilon  # type: ignore[assignment]
        self.centred = centred

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
        y: torch.Tensor = self.down_proj(Gated.apply(self.gate_proj(x), self.up_proj(x), self.tanh))
        return y
