"""Adapters by row in a running batch, over PEFT's modules.

The base's product is shared by all rows. Tokens are sorted by adapter. A few tokens of several
adapters share one low-rank product, in which each token sees zeros for the others' ranks; of many
tokens each adapter computes its own. PEFT's layers have another forward while rows are computed.
The base is added last, so that a small update is not rounded away (docs/adr/0014).

Shape legend: N tokens of all rows, M tokens of one adapter, I input features, O output features,
R rank, S ranks of all adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_torch.arrays import at_least_float32
from vox_torch.lora import weight_of

if TYPE_CHECKING:
    import torch
    from torch import nn

Shares: TypeAlias = Sequence[tuple[str | None, int]]
"""Adapters in the order of their tokens, each with its number of tokens."""

_SHARED = 2048
"""Tokens times ranks (N S) up to which a shared product is faster than one for each adapter."""

_KEPT = 4
"""Compositions of adapters whose values are kept side by side."""


@dataclass(frozen=True, slots=True, eq=False)
class _LowRank:
    """An adapter's values in one layer; `B_OR` includes the scale.

    On a CPU A and B are float32: their operands fit in a cache, and a bfloat16 product of oneDNN
    takes 14 microseconds whatever its size, that of the BLAS 2.
    """

    A_RI: torch.Tensor
    B_OR: torch.Tensor
    gain_O: torch.Tensor | None


class _Values:
    """The values of the adapters of some tokens in one layer, None for the base alone."""

    def __init__(self, values: Sequence[_LowRank | None]) -> None:
        self.each, known = values, [value for value in values if value is not None]
        self.any, self.gains = bool(known), any(value.gain_O is not None for value in known)
        self._ranks = tuple(0 if value is None else len(value.A_RI) for value in values)
        self._most = _SHARED // max(1, sum(self._ranks))
        self._stack = _stack(known) if 1 < len(known) <= self._most else None

    def update(self, x_NI: torch.Tensor, counts: tuple[int, ...], features: int) -> torch.Tensor:
        """Return each token's `scale * (x A^T) B^T`, (N, O)."""
        import torch
        from torch.nn.functional import linear

        if self._stack and len(x_NI) <= self._most:
            A_SI, B_OS = self._stack
            own_NS = linear(x_NI.to(A_SI.dtype), A_SI)
            own_NS.masked_fill_(_others(counts, self._ranks, x_NI.device), 0)
            return linear(own_NS, B_OS).to(x_NI.dtype)
        parts = zip(self.each, x_NI.split(counts), strict=True)
        updates = [_update(value, x_MI, features) for value, x_MI in parts]
        return updates[0] if len(updates) == 1 else torch.cat(updates)


class RowAdapters:
    """The adapters of a model, for each row of a batch its own.

    Args:
        model: with PEFT's layers, or without.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: dict[nn.Module, Callable[[], torch.Tensor] | None] | None = None
        self._wrappers: list[Any] = []
        self._read: dict[tuple[nn.Module, str], _LowRank] = {}
        self._kept: dict[tuple[str | None, ...], dict[nn.Module, _Values]] = {}

    def forget(self) -> None:
        """Find layers and read values again; call it when adapters have changed."""
        self._layers = None
        self._read.clear()
        self._kept.clear()

    def group(self, name: str | None) -> str | None:
        """Return an adapter's group; adapters of one group can share a forward pass.

        Each adapter with whole modules (`modules_to_save`) is a group of its own.
        """
        self._found()
        whole = any(name in wrapper.modules_to_save for wrapper in self._wrappers)
        return name if whole else None

    @contextmanager
    def computing(self, *shares: Shares) -> Iterator[None]:
        """Compute with the adapters of one group within the context.

        Args:
            shares: of all tokens, and of those at the head; a layer's number of tokens decides.
        """
        split = [tuple(zip(*each, strict=True)) for each in shares]
        by_count = {sum(counts): (names, counts) for names, counts in split}
        name = shares[0][0][0]
        forwards: dict[nn.Module, Any] = {
            layer: partial(self._forward, layer, weight, by_count)
            for layer, weight in self._found().items()
        }
        for wrapper in self._wrappers:
            whole = dict(wrapper.modules_to_save)
            forwards[wrapper] = whole.get(name, wrapper.original_module)
        with _forwards(forwards):
            yield

    def _found(self) -> dict[nn.Module, Callable[[], torch.Tensor] | None]:
        """Return each layer with an adapter, and its weight if its base is a linear layer."""
        from peft.tuners.lora import Linear, LoraLayer
        from peft.utils import ModulesToSaveWrapper

        if self._layers is None:
            modules = list(self._model.modules())
            self._wrappers = [each for each in modules if isinstance(each, ModulesToSaveWrapper)]
            self._layers = {
                layer: weight_of(layer.base_layer) if type(layer) is Linear else None
                for layer in modules
                if isinstance(layer, LoraLayer)
            }
        return self._layers

    def _forward(
        self,
        layer: Any,
        weight: Callable[[], torch.Tensor] | None,
        by_count: Mapping[int, tuple[tuple[str | None, ...], tuple[int, ...]]],
        x: torch.Tensor,
    ) -> torch.Tensor:
        """Return `x W^T + b` with the update of each token's adapter."""
        import torch

        base, features, x_NI = layer.base_layer, layer.out_features, x.reshape(-1, x.shape[-1])
        names, counts = by_count[len(x_NI)]
        values = self._values(layer, names)
        if not values.any:
            y: torch.Tensor = base(x)
            return y
        update_NO = values.update(x_NI, counts, features)
        if weight is None:
            return base(x) + update_NO.view(*x.shape[:-1], features)
        y_NO = torch.addmm(update_NO, x_NI, weight().T)
        if values.gains:
            for value, y_MO in zip(values.each, y_NO.split(counts), strict=True):
                if value is not None and value.gain_O is not None:
                    y_MO.mul_(value.gain_O)
        if base.bias is not None:
            y_NO.add_(base.bias)
        return y_NO.view(*x.shape[:-1], features)

    def _values(self, layer: Any, names: tuple[str | None, ...]) -> _Values:
        """Return the values of adapters; those of the newest compositions are kept."""
        if names not in self._kept:
            if len(self._kept) == _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[names] = {}
        if layer not in self._kept[names]:
            self._kept[names][layer] = _Values([self._value(layer, name) for name in names])
        return self._kept[names][layer]

    def _value(self, layer: Any, name: str | None) -> _LowRank | None:
        if name is None or name not in layer.lora_A:
            return None
        if (layer, name) not in self._read:
            self._read[layer, name] = _read(layer, name)
        return self._read[layer, name]


def _read(layer: Any, name: str) -> _LowRank:
    A_RI, B_OR = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
    scaled_OR = at_least_float32(B_OR) * layer.scaling[name]
    gain_O = _gain(layer, name, at_least_float32(A_RI), scaled_OR) if layer.use_dora[name] else None
    if A_RI.is_cpu:
        return _LowRank(at_least_float32(A_RI), scaled_OR, gain_O)
    return _LowRank(A_RI, scaled_OR.to(B_OR.dtype), gain_O)


def _stack(values: Sequence[_LowRank]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A and B of all adapters; None if zeros times B are not zeros."""
    import torch

    A_SI, B_OS = (
        torch.cat([each.A_RI for each in values]),
        torch.cat([each.B_OR for each in values], 1),
    )
    return (A_SI, B_OS) if B_OS.isfinite().all() else None


@lru_cache(maxsize=8)
def _others(counts: tuple[int, ...], ranks: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return for each token and rank whether the rank is of another adapter, bool (N, S)."""
    import torch

    owner_N, owner_S = (
        torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in (counts, ranks)
    )
    return (owner_N[:, None] != owner_S).to(device)


def _gain(layer: Any, name: str, A_RI: torch.Tensor, scaled_OR: torch.Tensor) -> torch.Tensor:
    """Return DoRA's magnitude over the row norms of `W + scale * B A` (Liu et al.,
    arXiv:2402.09353)."""
    import torch

    W_OI = weight_of(layer.base_layer)()
    magnitude_O = at_least_float32(layer.lora_magnitude_vector[name].weight.detach())
    norms_O = torch.addmm(at_least_float32(W_OI), scaled_OR, A_RI).norm(dim=1)
    return (magnitude_O / norms_O).to(W_OI.dtype)


def _update(value: _LowRank | None, x_MI: torch.Tensor, features: int) -> torch.Tensor:
    """Return `scale * (x A^T) B^T`, (M, O); zeros for the base alone."""
    from torch.nn.functional import linear

    if value is None:
        return x_MI.new_zeros((len(x_MI), features))
    narrow_MI = x_MI.to(value.A_RI.dtype)
    return linear(linear(narrow_MI, value.A_RI), value.B_OR).to(x_MI.dtype)


@contextmanager
def _forwards(replaced: Mapping[nn.Module, Any]) -> Iterator[None]:
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
