"""Adapters by row in a running batch, over PEFT's modules.

The base's product is shared by all rows. Tokens are sorted by adapter. A few tokens of several
adapters share one low-rank product, in which each token sees zeros for the others' ranks; of many
tokens each adapter computes its own. PEFT's layers have another forward while rows are computed.
The base is added last, so that a small update is not rounded away (docs/adr/0014).

On a CPU, a bfloat16 model that trains generates with packed copies of its weights. They are made
when prompts enter and no answer is under way, and freed before the next pass over documents.

This module imports torch; import it lazily.

Shape legend: N tokens of all rows, M tokens of one adapter, I input features, O output features,
R rank, S ranks of all adapters used so far, K adapters of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from vox_torch.arrays import at_least_float32
from vox_torch.lora import replaced_forwards, weight_of
from vox_torch.prepacked import PrepackedLinear, Product, copies, onto, quick_forwards

Shares: TypeAlias = Sequence[tuple[str | None, int]]
"""Adapters in the order of their tokens, each with its number of tokens."""

_ByCount: TypeAlias = Mapping[int, tuple[tuple[str | None, ...], tuple[int, ...]]]
"""Number of tokens -> adapters in their order, and how many of the tokens are each one's."""

_SHARED = 4096
"""Tokens times ranks (N S) up to which a shared product is faster than one for each adapter."""


class _Values:
    """The values of the adapters used so far, side by side, in the layers of one product, or in one
    layer; B includes the scales.

    On a CPU A and B are float32: their operands fit in a cache, and a bfloat16 product of oneDNN
    takes 14 microseconds whatever its size, that of the BLAS 2.

    Args:
        layers: PEFT's, each with its number of output features; None stands for one that is not
            PEFT's.

    Attributes:
        gains: of adapters with DoRA, (O,).
    """

    def __init__(self, layers: Sequence[tuple[Any, int]]) -> None:
        self._layers = layers
        self._spans: dict[str | None, tuple[int, int]] = {None: (0, 0)}
        self._A_SI: torch.Tensor
        self._B_OS: torch.Tensor
        self._own: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._finite = True
        self.gains: dict[str | None, torch.Tensor] = {}

    def update(
        self, names: Sequence[str | None], counts: tuple[int, ...], x_NI: torch.Tensor
    ) -> torch.Tensor | None:
        """Return each token's `scale * (x A^T) B^T`, (N, O); None if no adapter has values here."""
        spans = tuple(self._span(name) for name in names)
        active = sum(start < stop for start, stop in spans)
        if not active:
            return None
        A_SI, B_OS = self._A_SI, self._B_OS
        narrow_NI = x_NI.to(A_SI.dtype)
        if len(names) == 1:
            A_RI, B_OR = self._matrices(names[0])
            return functional.linear(functional.linear(narrow_NI, A_RI), B_OR).to(x_NI.dtype)
        if active > 1 and self._finite and len(x_NI) * len(A_SI) <= _SHARED:
            own_NS = functional.linear(narrow_NI, A_SI)
            own_NS.masked_fill_(_others(counts, spans, len(A_SI), x_NI.device), 0)
            return functional.linear(own_NS, B_OS).to(x_NI.dtype)
        updates = []
        for name, narrow_MI in zip(names, narrow_NI.split(counts), strict=True):
            A_RI, B_OR = self._matrices(name)
            updates.append(functional.linear(functional.linear(narrow_MI, A_RI), B_OR))
        return torch.cat(updates).to(x_NI.dtype)

    def _span(self, name: str | None) -> tuple[int, int]:
        """Return the ranks of an adapter, which is read at its first use."""
        if name not in self._spans:
            there = any(_has(layer, name) for layer, _ in self._layers)
            self._spans[name] = self._read(name) if there else (0, 0)
        return self._spans[name]

    def _matrices(self, name: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of an adapter that has a span."""
        if name not in self._own:
            start, stop = self._spans[name]
            self._own[name] = self._A_SI[start:stop], self._B_OS[:, start:stop]
        return self._own[name]

    def _read(self, name: str | None) -> tuple[int, int]:
        each_A, each_B, gains = [], [], list[torch.Tensor]()
        for layer, size in self._layers:
            if _has(layer, name):
                A_RI, B_OR, gain_O = _of_layer(layer, name)
                each_A.append(A_RI)
            else:
                B_OR, gain_O = torch.empty(size, 0), torch.ones(())
            each_B.append(B_OR)
            gains.append(gain_O.expand(size))
        A_RI, B_OR = torch.cat(each_A), torch.block_diag(*each_B)
        if any(_has(layer, name) and layer.use_dora[name] for layer, _ in self._layers):
            self.gains[name] = torch.cat(gains)
        self._finite &= bool(B_OR.isfinite().all())  # else zeros times B are not zeros
        start = max(stop for _, stop in self._spans.values())
        if start:
            A_RI, B_OR = torch.cat([self._A_SI, A_RI]), torch.cat([self._B_OS, B_OR], dim=1)
        self._A_SI, self._B_OS = A_RI, B_OR
        self._own.clear()
        return start, len(A_RI)


class RowAdapters:
    """The adapters of a model, for each row of a batch its own.

    Args:
        model: with PEFT's layers, or without.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[Any] | None = None
        self._copies: dict[nn.Module, PrepackedLinear] = {}
        self._quick: dict[nn.Module, Any] = {}
        self._wrappers: list[Any] = []
        self._values: dict[nn.Module | Product, _Values] = {}

    def forget(self) -> None:
        """Find layers and read weights again; call it when adapters or weights have changed."""
        for packed in self._copies.values():
            packed.product.clear()
        self._layers = None
        self._copies.clear()
        self._quick.clear()
        self._values.clear()

    def pack(self) -> None:
        """Compute with packed copies of linear layers until `release` or `forget`.

        In bfloat16, in which products have the same bits: in float32, answers would not be those of
        a base that is split.
        """
        if not self._copies and self._model.dtype == torch.bfloat16:
            layers = self._found()
            self._copies = copies(self._model)
            for layer in layers:
                if packed := self._copies.get(layer.base_layer):
                    packed.product.adapted[packed.number] = layer
            self._quick |= {layer: packed.forward for layer, packed in self._copies.items()}
            self._values.clear()

    def release(self) -> None:
        """Free the copies, which a pass over documents needs the memory of."""
        if self._copies:
            self.forget()

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
        layers = self._found()
        if {name for name, _ in shares[0]} == {None}:  # the base alone: nothing to add
            with replaced_forwards(self._quick):
                yield
            return
        split = [tuple(zip(*each, strict=True)) for each in shares]
        by_count = {sum(counts): (names, counts) for names, counts in split}
        name = shares[0][0][0]
        forwards = self._quick | {
            layer: partial(self._forward, layer, by_count) for layer in layers
        }
        for wrapper in self._wrappers:
            whole = dict(wrapper.modules_to_save)
            forwards[wrapper] = whole.get(name, wrapper.original_module)
        with replaced_forwards(forwards):
            yield

    def _found(self) -> list[Any]:
        """Return PEFT's layers."""
        from peft.tuners.lora import LoraLayer
        from peft.utils import ModulesToSaveWrapper

        if self._layers is None:
            modules = list(self._model.modules())
            self._wrappers = [each for each in modules if isinstance(each, ModulesToSaveWrapper)]
            self._layers = [each for each in modules if isinstance(each, LoraLayer)]
            self._quick = quick_forwards(self._model)
        return self._layers

    def _forward(self, layer: Any, by_count: _ByCount, x: torch.Tensor) -> torch.Tensor:
        """Return `x W^T + b` with the update of each token's adapter."""
        base = self._copies.get(layer.base_layer, layer.base_layer)
        if not isinstance(base, PrepackedLinear):
            return self._sum(base, [(layer, layer.out_features)], by_count, x)
        product = base.product
        layers = [(product.adapted.get(i), size) for i, size in enumerate(product.sizes)]
        compute = partial(self._sum, product, layers, by_count, x)
        return product.part(base.number, x, compute, by_count)

    def _sum(
        self, base: Any, layers: Sequence[tuple[Any, int]], by_count: _ByCount, x: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum for all layers of a product, or for one layer.

        Args:
            base: the product, or the layer's base.
        """
        from peft.tuners.lora import Linear

        x_NI = x.reshape(-1, x.shape[-1])
        names, counts = by_count[len(x_NI)]
        if base not in self._values:
            self._values[base] = _Values(layers)
        values = self._values[base]
        update_NO = values.update(names, counts, x_NI)
        if update_NO is None:
            y: torch.Tensor = base(x)
            return y
        adapted = [i for i, (layer, _) in enumerate(layers) if any(_has(layer, n) for n in names)]
        if isinstance(base, Product):
            y_NO = base.onto(update_NO, x_NI, adapted)
        elif type(layers[0][0]) is Linear:
            y_NO = onto(update_NO, x_NI, weight_of(base)())
        else:
            return base(x) + update_NO.view(*x.shape[:-1], -1)
        if values.gains:
            for name, y_MO in zip(names, y_NO.split(counts), strict=True):
                if name in values.gains:
                    y_MO.mul_(values.gains[name])
        if isinstance(base, Product):
            base.add_bias(y_NO, adapted)
        elif base.bias is not None:
            y_NO.add_(base.bias)
        return y_NO.view(*x.shape[:-1], -1)


@lru_cache(maxsize=8)
def _others(
    counts: tuple[int, ...], spans: tuple[tuple[int, int], ...], ranks: int, device: torch.device
) -> torch.Tensor:
    """Return for each token and rank whether the rank is not of its adapter, bool (N, S)."""
    ranks_S, counts_K = torch.arange(ranks), torch.tensor(counts)
    start_K1, stop_K1 = torch.tensor(spans).split(1, dim=1)
    others_KS = (ranks_S < start_K1) | (ranks_S >= stop_K1)
    return others_KS.repeat_interleave(counts_K, dim=0).to(device)


def _has(layer: Any, name: str | None) -> bool:
    return layer is not None and name in layer.lora_A


def _of_layer(layer: Any, name: str | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return A, B with its scale, and the gain of an adapter's DoRA, (O,), or one."""
    A_RI, B_OR = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
    scaled_OR = at_least_float32(B_OR) * layer.scaling[name]
    gain_O = A_RI.new_ones(())
    if layer.use_dora[name]:
        gain_O = _gain(layer, name, at_least_float32(A_RI), scaled_OR)
    if A_RI.is_cpu:
        return at_least_float32(A_RI), scaled_OR, gain_O
    return A_RI, scaled_OR.to(B_OR.dtype), gain_O


def _gain(
    layer: Any, name: str | None, A_RI: torch.Tensor, scaled_OR: torch.Tensor
) -> torch.Tensor:
    """Return DoRA's magnitude over the row norms of `W + scale * B A` (Liu et al.,
    arXiv:2402.09353)."""
    W_OI = weight_of(layer.base_layer)()
    magnitude_O = at_least_float32(layer.lora_magnitude_vector[name].weight.detach())
    norms_O = torch.addmm(at_least_float32(W_OI), scaled_OR, A_RI).norm(dim=1)
    return (magnitude_O / norms_O).to(W_OI.dtype)
