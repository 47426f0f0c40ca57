"""A base model of mlx-lm with adapters by name, as vox's `Model`.

Documents become padded rows (`loss.rows`). On a CPU more than some hundred tokens bring no speed,
while padding and cache misses cost some: there, batches are split into smaller ones, mostly of a
single document. Each part of a batch has dropout of its own.

Shape legend: T tokens of a batch, N rows, L padded length, K scored positions, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from vox_core.contract import AdapterState, Batch, Floats, Ints, Model, padded_groups
from vox_mlx.base import require_window
from vox_mlx.generate import Generation, beginning, can_be_cut
from vox_mlx.inject import Adapters, Values
from vox_mlx.loss import Rows, begun_alike, choose_at_head, nll, rows

_ON_CPU = 256
"""Positions of padded rows at once. The cost of a call is that of some 30 tokens of SmolLM2."""
_LENGTHS, _SCORED = 32, 64
"""On a GPU, lengths of rows and numbers of scored positions are rounded up to multiples of these,
so that few shapes are compiled."""


class MlxModel(Model):
    """A base in memory, its adapters and the running batch.

    Args:
        model: frozen; changed from now on.
        config: the model's `config.json`.
        dtype: of the adapters.
        dropout: rate of the adapters' inputs, in evaluations with a seed.
        settles: precompute what decoding needs of an adapter; it reads the weights of a DoRA.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        dtype: mx.Dtype,
        dropout: float = 0.0,
        *,
        settles: bool = True,
    ) -> None:
        self._base: nn.Module | None = model.eval()
        self._config, self._settles = config, settles
        self._adapters = Adapters(model, config["model_type"], dtype, dropout)
        self._chosen = choose_at_head(model)
        self._modules: dict[str | None, int] = {None: 0}
        self._generation = Generation(self._new_cache, self._next_logits, self._adapters.lane)

    def add_adapter(self, name: str, adapter: AdapterState, values: Values | None = None) -> None:
        self._adapters.add(name, adapter, values)
        self._modules[name] = len(adapter.modules)

    def remove_adapter(self, name: str) -> None:
        self._adapters.remove(name)
        del self._modules[name]

    def log_probs(
        self, batch: Batch, adapter: str | None = None, seed: int | None = None
    ) -> Floats:
        self._ready([adapter])
        log_probs_T = np.zeros(batch.targets_T.shape, np.float32)
        families = [(0, list(batch.documents()))]
        # Each family is a pass of its own, and a pass of a streamed model reads all files.
        if seed is None and self._settles and can_be_cut(self._new_cache()):
            families = begun_alike(batch)
        for begun, documents in families:
            cache = self._prefilled(adapter, batch.tokens_T[documents[0]][:begun])
            rest = [slice(each.start + begun, each.stop) for each in documents]
            for part, positions_K, key in self._parts(batch, rest, seed):
                after = cache and beginning(cache, begun, len(part.tokens_NL))
                for layer in after or ():
                    layer.step = 1  # else the cache of each row grows by 256 tokens
                nll_K = self._nll(adapter, part, key, after)
                log_probs_T[positions_K] = -np.array(nll_K)[: len(positions_K)]
        return log_probs_T

    def logits(self, tokens_T: Ints, adapter: str | None = None, first: int = 0) -> Floats:
        (logits_KV,) = self.logits_all([(tokens_T, first)], adapter)
        return logits_KV

    def logits_all(
        self, documents: Sequence[tuple[Ints, int]], adapter: str | None = None
    ) -> list[Floats]:
        longest = max(len(tokens_T) for tokens_T, _ in documents)
        require_window(self._config, longest)
        tokens_NL, index = np.zeros((len(documents), longest), np.int32), []
        for row, (tokens_T, first) in enumerate(documents):
            tokens_NL[row, : len(tokens_T)] = tokens_T
            index.append(row * longest + np.arange(first, len(tokens_T)))
        self._ready([adapter])
        self._begin(adapter)
        self._chosen.index_K = mx.array(np.concatenate(index))
        logits_KV = np.array(self._model(mx.array(tokens_NL)).astype(mx.float32))
        return np.split(logits_KV, np.cumsum([len(each) for each in index])[:-1])

    def insert(self, row: int, tokens_T: Ints, adapter: str | None = None) -> None:
        require_window(self._config, len(tokens_T))
        self._generation.insert(row, tokens_T, adapter)

    def advance(self, tokens: Mapping[int, int]) -> Mapping[int, Floats]:
        for row in tokens:
            require_window(self._config, self._generation.length(row) + 1)
        return self._generation.advance(tokens)

    def reuse(self, row: int, source: int, count: int) -> bool:
        return self._generation.reuse(row, source, count)

    def remove(self, row: int) -> None:
        self._generation.remove(row)

    def close(self) -> None:
        self._base = None
        for name in ("_adapters", "_generation"):  # which hold it, too
            vars(self).pop(name, None)
        gc.collect()  # layers and their adapters know each other
        mx.clear_cache()

    @property
    def _model(self) -> nn.Module:
        assert self._base is not None, "the model was closed"
        return self._base

    def _ready(self, names: Sequence[str | None]) -> None:
        """Bring the tensors of these adapters up to date in the model."""
        if self._model.training:
            self._model.eval()

    def _begin(self, adapter: str | None, key: mx.array | None = None) -> None:
        """Choose the adapter of all rows, and the key of its dropout."""
        self._adapters.choose([adapter])
        self._adapters.dropout.begin(key, self._modules[adapter])

    def _prefilled(self, adapter: str | None, tokens_T: Ints) -> list[Any] | None:
        """Return the cache of a row with these tokens; None without any."""
        if not len(tokens_T):
            return None
        self._begin(adapter)
        self._chosen.index_K, cache = mx.array([0]), self._new_cache()
        self._model(mx.array(tokens_T)[None], cache=cache)
        return cache

    def _parts(
        self, batch: Batch, documents: Sequence[slice], seed: int | None
    ) -> Iterator[tuple[Rows, Ints, mx.array | None]]:
        """Split documents for the device; yield rows, positions in the batch, the dropout's key."""
        groups = [documents]
        if not on_gpu():
            lengths = [document.stop - document.start for document in documents]
            groups = [[documents[i] for i in g] for g in padded_groups(lengths, _ON_CPU)]
        rounding = (_LENGTHS, _SCORED) if on_gpu() else (1, 1)
        keys = None if seed is None else mx.random.split(mx.random.key(seed), len(groups))
        for index, group in enumerate(groups):
            part, positions_K = rows(batch, group, *rounding)
            if len(positions_K):
                yield part, positions_K, None if keys is None else keys[index]

    def _nll(
        self,
        adapter: str | None,
        part: Rows,
        key: mx.array | None,
        cache: list[Any] | None = None,
    ) -> mx.array:
        """Return (K,) `-log p(target)` at the scored positions, behind a cache if there is one."""
        self._begin(adapter, key)
        self._chosen.index_K = part.index_K
        return nll(self._model(part.tokens_NL, cache=cache), part.targets_K)

    def _new_cache(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        cache: list[Any] = make_prompt_cache(self._model)
        return cache

    def _next_logits(
        self, tokens_NL: mx.array, names: Sequence[str | None], cache: list[Any]
    ) -> mx.array:
        """Return (N, V) logits behind the last token of each row, and append to the cache."""
        self._ready(names)
        if self._settles:
            self._adapters.settle(names)
        count, length = tokens_NL.shape
        self._adapters.choose(names, decoding=length == 1)
        self._adapters.dropout.begin(None)
        self._chosen.index_K = (mx.arange(count) + 1) * length - 1
        return self._model(tokens_NL, cache=cache)


def on_gpu() -> bool:
    """Whether MLX computes on a GPU."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)
