"""Puts the functions of elementwise.py into transformers' modules, where that changes nothing.

No list of families: a module is recognised by what it has (a weight and an epsilon; gate, up and
down projections), and is swapped if both ways give the same on random numbers but for roundoff.
What is not recognised, or differs, or is trained itself, keeps its own forward. Only the instance
is touched: other models of the same class never notice.

Norms are tried one by one, as a norm of ones does not show where its weight comes in. Of the others
the first with the same code answers for all.

This module imports torch, and is imported when there is a model to compute with.

Shape legend: X tokens, H hidden size, N heads, T tokens, D features of a head.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from vox_torch.elementwise import Gated, RmsNorm, Rotary
from vox_torch.memory import is_out_of_memory

_ROTARY = "apply_rotary_pos_emb"
_ROUNDOFFS = 4.0
"""How far the two ways may lie apart, in roundoffs of a row's largest number: each rounds a number
two or three times."""

_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_LARGEST_GATE = 100.0
"""Far beyond where any family clamps its gates (7 to 16), and whose square float16 still holds."""

_NOT_UNDERSTOOD = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a module raises that asks for something else than its like."""

Pair = tuple[torch.Tensor, torch.Tensor]
Way = Callable[[nn.Module, torch.Tensor], Callable[..., Any] | None]


def swap(model: nn.Module, dtype: torch.dtype, device: str) -> dict[str, int]:
    """Swap what can be; returns how many modules of each kind were. Leaves the model in evaluation
    mode.

    Args:
        dtype: what the model computes in.
    """
    counts = {"norms": 0, "feed-forwards": 0, "rotary positions": 0}
    like = torch.empty(0, dtype=dtype, device=device)
    ways: tuple[Way, ...] = (_norm, partial(_gated, {}), partial(_rotary, {}))
    with torch.no_grad():
        for module in list(model.eval().modules()):
            for kind, way in zip(counts, ways, strict=True):
                counts[kind] += _swapped(module, way, like)
    return counts


def _swapped(module: nn.Module, way: Way, like: torch.Tensor) -> bool:
    try:
        forward = way(module, like)
    except _NOT_UNDERSTOOD as error:
        if is_out_of_memory(error):
            raise
        return False
    if forward is not None:
        module.forward = forward
    return forward is not None


def _takes_one(module: nn.Module) -> bool:
    """Whether a tensor is all that the module's forward can be given."""
    return len(inspect.signature(type(module).forward).parameters) == 2


def _random(*shape: int) -> torch.Tensor:
    """Normal numbers, always the same, that no generator of torch's own notices."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    bound_X1 = _ROUNDOFFS * torch.finfo(expected.dtype).eps * expected.abs().amax(-1, keepdim=True)
    return bool(((found - expected).abs() <= bound_X1).all())


# --- norms ----------------------------------------------------------------------------------------


class _NormWay(NamedTuple):
    weight_H: torch.Tensor
    eps: float
    late: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = RmsNorm.apply(x, *self)
        return y


def _norm(module: nn.Module, like: torch.Tensor) -> _NormWay | None:
    """An RMS norm's way; None if the module is none, or is trained."""
    weight_H = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    alone = len(module._parameters) == 1 and not module._modules
    if weight_H is None or not alone or weight_H.ndim != 1 or not isinstance(eps, float):
        return None
    if weight_H.requires_grad or not _takes_one(module):
        return None
    # Small, too: there the epsilon shows.
    sizes_X1 = torch.tensor([[1.0], [1e-3], [30.0]])
    x_XH = (_random(3, len(weight_H)) * sizes_X1).to(like)
    expected = module(x_XH)
    return next((way for way in _norm_ways(weight_H, eps) if _same(way(x_XH), expected)), None)


def _norm_ways(weight_H: torch.Tensor, eps: float) -> Iterator[_NormWay]:
    yield _NormWay(weight_H.detach(), eps, True)
    yield _NormWay(1 + weight_H.detach().float(), eps, False)
    yield _NormWay(weight_H.detach().float(), eps, False)


# --- feed-forwards --------------------------------------------------------------------------------


def _gated(
    tried: dict[tuple[type, bool], bool], module: nn.Module, like: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    code = getattr(type(module).forward, "__code__", None)
    if code is None or set(code.co_names) != _FEED_FORWARD or not _takes_one(module):
        return None
    if "forward" in vars(module):
        return None
    # In float32, where activations that look alike in half precision do not.
    tanh = _activation(module.act_fn, like.float())
    if tanh is None:
        return None
    forward = partial(_feed_forward, module, tanh)
    kind = type(module), tanh
    if kind not in tried:
        tried[kind] = _gates(module, forward, like)
    return forward if tried[kind] else None


def _gates(
    module: Any, forward: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
) -> bool:
    """Whether `forward` is what the module computes, for large gates too."""
    x_1XH = _random(1, 3, module.gate_proj.in_features).to(like)
    largest = max(part(x_1XH).abs().max() for part in (module.gate_proj, module.up_proj))
    x_1XH[:, 1] *= (_LARGEST_GATE / largest.clamp(min=1e-3)).to(like)
    return _same(forward(x_1XH), module(x_1XH))


def _activation(act: Any, like: torch.Tensor) -> bool | None:
    """Whether it is the GELU by a hyperbolic tangent; None if it is neither that nor SiLU."""
    x_2X = torch.stack([torch.linspace(-most, most, 97) for most in (6, _LARGEST_GATE)]).to(like)
    found = act(x_2X)
    if _same(found, functional.silu(x_2X)):
        return False
    return True if _same(found, functional.gelu(x_2X, approximate="tanh")) else None


def _feed_forward(module: Any, tanh: bool, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = module.down_proj(Gated.apply(module.gate_proj(x), module.up_proj(x), tanh))
    return y


# --- rotary positions -----------------------------------------------------------------------------


def _rotary(
    tried: dict[Callable[..., Pair], bool], module: nn.Module, like: torch.Tensor
) -> Callable[..., Any] | None:
    """The forward of an attention module, with another function where it turns query and key."""
    forward = type(module).forward
    code = getattr(forward, "__code__", None)
    if code is None or _ROTARY not in code.co_names or "forward" in vars(module):
        return None
    own = forward.__globals__[_ROTARY]
    if own not in tried:
        tried[own] = _turns(own, like)
    if not tried[own]:
        return None
    changed = types.FunctionType(
        code,
        {**forward.__globals__, _ROTARY: partial(_turned, own)},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(changed, module)


def _turns(own: Callable[..., Pair], like: torch.Tensor) -> bool:
    """Whether `own` is what `Rotary` computes."""
    query, key = _random(1, 4, 5, 8).to(like), _random(1, 2, 5, 8).to(like)
    angle = _random(1, 5, 4).repeat(1, 1, 2)
    cos, sin = angle.cos().to(like), angle.sin().to(like)
    pairs = zip(_turned(own, query, key, cos, sin), own(query, key, cos, sin), strict=True)
    return all(_same(found, expected) for found, expected in pairs)


def _turned(
    own: Callable[..., Pair],
    query_1NTD: torch.Tensor,
    key_1NTD: torch.Tensor,
    cos_1TD: torch.Tensor,
    sin_1TD: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> Pair:
    dtypes = {each.dtype for each in (query_1NTD, key_1NTD, cos_1TD, sin_1TD)}
    if cos_1TD.shape[-1] != query_1NTD.shape[-1] or len(dtypes) > 1:
        return own(query_1NTD, key_1NTD, cos_1TD, sin_1TD, unsqueeze_dim=unsqueeze_dim)
    cos, sin = cos_1TD.unsqueeze(unsqueeze_dim), sin_1TD.unsqueeze(unsqueeze_dim)
    return Rotary.apply(query_1NTD, cos, sin), Rotary.apply(key_1NTD, cos, sin)
