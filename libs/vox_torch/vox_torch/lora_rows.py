"""Adapters by row in a running batch, over PEFT's modules.

The base's product is shared by all rows. Tokens are sorted by adapter, and each adapter computes
its low-rank product for its own tokens. PEFT's layers have another forward while rows are
computed. The base is added last, so that a small update is not rounded away (docs/adr/0014).

Shape legend: N tokens of all rows, M tokens of one adapter, I input features, O output features,
R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_torch.arrays import at_least_float32
from vox_torch.lora import weight_of

if TYPE_CHECKING:
    import torch
    from torch import nn

Shares: TypeAlias = Sequence[tuple[str | None, int]]
"""Adapters in the order of their tokens, each with its number of tokens."""


@dataclass(frozen=True, slots=True)
class _LowRank:
    """An adapter's values in one layer; `B_OR` includes the scale.

    On a CPU A and B are float32: their operands fit in a cache, and a bfloat16 product of oneDNN
    takes 14 microseconds whatever its size, that of the BLAS 2.
    """

    A_RI: torch.Tensor
    B_OR: torch.Tensor
    gain_O: torch.Tensor | None


class RowAdapters:
    """The adapters of a model, for each row of a batch its own.

    Args:
        model: with PEFT's layers, or without.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: dict[nn.Module, Callable[[], torch.Tensor] | None] | None = None
        self._wrappers: list[Any] = []
        self._values: dict[tuple[nn.Module, str], _LowRank] = {}

    def forget(self) -> None:
        """Find layers and read values again; call it when adapters have changed."""
        self._layers = None
        self._values.clear()

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
        by_count = {sum(count for _, count in each): each for each in shares}
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
        by_count: Mapping[int, Shares],
        x: torch.Tensor,
    ) -> torch.Tensor:
        """Return `x W^T + b` with the update of each token's adapter."""
        import torch

        base, features, x_NI = layer.base_layer, layer.out_features, x.reshape(-1, x.shape[-1])
        shares = by_count[len(x_NI)]
        values = [self._value(layer, name) for name, _ in shares]
        counts = [count for _, count in shares]
        if not any(values):
            y: torch.Tensor = base(x)
            return y
        parts = zip(values, x_NI.split(counts), strict=True)
        update_NO = _joined([_update(value, x_MI, features) for value, x_MI in parts])
        if weight is None:
            return base(x) + update_NO.view(*x.shape[:-1], features)
        y_NO = torch.addmm(update_NO, x_NI, weight().T)
        for value, y_MO in zip(values, y_NO.split(counts), strict=True):
            if value is not None and value.gain_O is not None:
                y_MO.mul_(value.gain_O)
        if base.bias is not None:
            y_NO.add_(base.bias)
        return y_NO.view(*x.shape[:-1], features)

    def _value(self, layer: Any, name: str | None) -> _LowRank | None:
        if name is None or name not in layer.lora_A:
            return None
        if (layer, name) not in self._values:
            self._values[layer, name] = _read(layer, name)
        return self._values[layer, name]


def _read(layer: Any, name: str) -> _LowRank:
    A_RI, B_OR = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
    scaled_OR = at_least_float32(B_OR) * layer.scaling[name]
    gain_O = _gain(layer, name, at_least_float32(A_RI), scaled_OR) if layer.use_dora[name] else None
    if A_RI.is_cpu:
        return _LowRank(at_least_float32(A_RI), scaled_OR, gain_O)
    return _LowRank(A_RI, scaled_OR.to(B_OR.dtype), gain_O)


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


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
