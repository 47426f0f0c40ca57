"""Continuous batching: rows enter and leave a running batch, over a transformers model.

A step is one forward pass: the new tokens of all rows are concatenated, each row has its own cache
(cached.py) and its own adapter (lora_rows.py). Prompts share the chunk of a step, short ones first,
so that a long one holds up neither the answers nor a short prompt.

A short trial compares this with the model's own forward pass. A model that fails it gets one
forward pass a row, with transformers' own cache; so do models whose layers pass a state from token
to token, or whose rotary embedding depends on the longest row.

This module imports torch; import it lazily.

Shape legend: T new tokens of all rows, K rows of a step, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vox_torch.cached import CACHED_ROWS, RowCache, RowExtents, SlotsByCapacity, register
from vox_torch.lora_rows import Shares
from vox_torch.memory import is_out_of_memory
from vox_torch.trial import NOT_UNDERSTOOD, recurrent, relative_distance, tolerance, window_untold

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vox_core.contract import Floats, Ints

CHUNK, CHUNK_ON_CPU = 512, 64
"""Tokens of prompts that a step computes beside other rows; of a prompt alone, twice as many. On a
CPU twice as many take almost twice as long."""


@dataclass(slots=True)
class _Row:
    """A row of the batch, with the part of its prompt that is not computed yet."""

    adapter: str | None
    prompt: list[int]
    cache: Any


@dataclass(frozen=True, slots=True)
class New:
    """New tokens of one row in a forward pass."""

    cache: Any
    adapter: str | None
    tokens: Sequence[int]


class ByRow(Protocol):
    """The adapters of a model, for each row its own; `RowAdapters` over PEFT's layers."""

    def group(self, name: str | None) -> str | None:
        """Return an adapter's group; adapters of one group can share a forward pass."""
        ...

    def pack(self) -> None:
        """Prepare for many steps, before the first row of a batch."""
        ...

    def computing(self, *shares: Shares) -> AbstractContextManager[None]:
        """Compute with the adapters of one group within the context.

        Args:
            shares: of all tokens, and of those at the head.
        """
        ...


class Forward(Protocol):
    """A forward pass over new tokens.

    Attributes:
        in_chunks: whether a prompt may be computed in chunks.
    """

    in_chunks: bool

    def new_cache(self) -> Any:
        """Return the cache of a row without tokens."""
        ...

    def decode(self, caches: Sequence[Any]) -> None:
        """Prepare the rows that get one token in the next step."""
        ...

    def __call__(self, news: Sequence[New]) -> torch.Tensor:
        """Return logits (K, V) behind the last token of each row.

        Args:
            news: with adapters of one group, sorted by adapter.
        """
        ...


class RunningBatch:
    """The running batch of a model, as `vox_core.contract.Model` describes it.

    The model is in evaluation mode, and left with another attention function than its own.

    Args:
        one_by_one: a reason to compute rows one by one without a trial.

    Attributes:
        one_by_one: why rows are computed one by one; None if they are not, or not tried yet.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapters: ByRow,
        device: str,
        attention: str,
        one_by_one: str | None = None,
    ) -> None:
        self._adapters, self.one_by_one = adapters, one_by_one
        self._chunk = CHUNK_ON_CPU if device == "cpu" else CHUNK
        self._base = Base(model, adapters, device, attention)
        self._rows: dict[int, _Row] = {}
        self._forward: Forward | None = None
        if one_by_one is not None:
            self._forward = OneByOne(self._base, in_chunks=False)

    def insert(self, row: int, tokens_T: Ints, adapter: str | None = None) -> None:
        """Let a row with a prompt of at least one token enter."""
        if self._forward is None:
            self._forward, self.one_by_one = fastest(self._base)
        prompt = [int(token) for token in tokens_T]
        self._rows[row] = _Row(adapter, prompt, self._forward.new_cache())

    def reuse(self, row: int, source: int, count: int) -> bool:
        """Copy the first tokens' cache of another row, where rows are computed together."""
        cache = self._rows[row].cache
        if not isinstance(cache, RowCache):
            return False
        cache.begin_as(self._rows[source].cache, count)
        del self._rows[row].prompt[:count]
        return True

    def remove(self, row: int) -> None:
        """Let a row leave, and free its cache."""
        cache = self._rows.pop(row).cache
        if isinstance(cache, RowCache):
            cache.free()

    def advance(self, tokens: Mapping[int, int]) -> dict[int, Floats]:
        """Append each token to its row, and compute the next chunk of the prompts.

        Returns:
            Row -> float32 logits (V,) behind its last token, for each row of `tokens`, and for
            inserted rows once their prompt is computed.
        """
        if not tokens:  # no row is between two tokens of its answer
            self._adapters.pack()
        if self._forward:
            self._forward.decode([self._rows[row].cache for row in tokens])
        news = {row: [token] for row, token in tokens.items()} | self._prompts()
        logits: dict[int, Floats] = {}
        for group in self._groups(news):
            logits |= self._compute({row: news[row] for row in group})
        for row, done in news.items():
            if row not in tokens:
                del self._rows[row].prompt[: len(done)]
        return {row: logits[row] for row in news if not self._rows[row].prompt}

    def _prompts(self) -> dict[int, list[int]]:
        """Return the next tokens of the prompts: a chunk of those of the shortest first, and at
        least a quarter of a chunk of the oldest, which would never end otherwise."""
        left = {row: state.prompt for row, state in self._rows.items() if state.prompt}
        if not left:
            return {}
        oldest, *others = left
        room, chunks = self._chunk * (1 if len(self._rows) > 1 else 2), dict[int, list[int]]()
        for row in [*sorted(others, key=lambda row: len(left[row])), oldest]:
            if row == oldest:
                room = max(room, self._chunk // 4)
            if room > 0:
                chunks[row] = left[row][: room if self._forward.in_chunks else None]
                room -= len(chunks[row])
        return chunks

    def _groups(self, rows: Iterable[int]) -> list[list[int]]:
        """Return the rows of each forward pass, sorted by adapter."""

        def key(row: int) -> tuple[str, str]:
            adapter = self._rows[row].adapter
            return self._adapters.group(adapter) or "", adapter or ""

        ordered = sorted(rows, key=key)
        return [list(group) for _, group in itertools.groupby(ordered, lambda row: key(row)[0])]

    def _compute(self, news: Mapping[int, list[int]]) -> dict[int, Floats]:
        rows = [self._rows[row] for row in news]
        parts = zip(rows, news.values(), strict=True)
        with torch.inference_mode():
            logits_KV = self._forward([New(row.cache, row.adapter, part) for row, part in parts])
            return dict(zip(news, logits_KV.float().cpu().numpy(), strict=True))


@dataclass(frozen=True, slots=True)
class Base:
    """A model with adapters.

    Args:
        attention: the model's own attention function, by transformers' name.
    """

    model: PreTrainedModel
    adapters: ByRow
    device: str
    attention: str

    def __call__(self, news: Sequence[New], *, attention: str, **arguments: Any) -> Any:
        """Return the model's output for the new tokens of all rows in one sequence."""
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
        tokens_T = self.on_device([token for new in news for token in new.tokens])
        with self.adapters.computing(*_shares(news)):
            return self.model(input_ids=tokens_T[None], **arguments)

    def on_device(self, numbers: list[int]) -> torch.Tensor:
        """Return int64 numbers (T,) on the device."""
        return torch.tensor(numbers, device=self.device)


class Together:
    """Computes all rows in one forward pass, over their own caches."""

    in_chunks = True

    def __init__(self, base: Base) -> None:
        register()
        self._base, self._slots = base, SlotsByCapacity()
        self.windows: set[int | None] = set()

    def new_cache(self) -> RowCache:
        """Return the cache of a row without tokens."""
        return RowCache()

    def decode(self, caches: Sequence[RowCache]) -> None:
        """Put the rows that get one token in the next step side by side, if attention can use it:
        capped scores are computed row by row."""
        config = self._base.model.config.get_text_config()
        if not getattr(config, "attn_logit_softcapping", None):
            self._slots.hold(caches)

    def __call__(self, news: Sequence[New]) -> torch.Tensor:
        """Return logits (K, V) behind the last token of each row."""
        counts = [len(new.tokens) for new in news]
        rows = RowExtents([new.cache for new in news], counts, self._base.device)
        last_K = self._base.on_device(list(itertools.accumulate(counts))) - 1
        out = self._base(
            news,
            attention=CACHED_ROWS,
            position_ids=self._base.on_device(rows.positions())[None],
            rows=rows,
            use_cache=False,
            logits_to_keep=last_K,
        )
        rows.commit()
        self.windows = rows.windows
        logits = out.logits[0]
        return logits if len(logits) == len(news) else logits[last_K]


class OneByOne:
    """Computes each row in a forward pass of its own, over transformers' cache."""

    def __init__(self, base: Base, *, in_chunks: bool) -> None:
        self._base = base
        self.in_chunks = in_chunks

    def new_cache(self) -> dict[str, Any]:
        """Return the cache of a row without tokens."""
        return {}

    def decode(self, caches: Sequence[Any]) -> None:
        """Rows need no preparation."""

    def __call__(self, news: Sequence[New]) -> torch.Tensor:
        """Return logits (K, V) behind the last token of each row."""
        return torch.cat([self._row(new) for new in news])

    def _row(self, new: New) -> torch.Tensor:
        own = self._base.attention
        out = self._base([new], attention=own, use_cache=True, logits_to_keep=1, **new.cache)
        new.cache["past_key_values"] = out.past_key_values
        logits_1V: torch.Tensor = out.logits[0, -1:]
        return logits_1V


def fastest(base: Base) -> tuple[Forward, str | None]:
    """Return the fastest correct forward pass, and why it is not `Together`."""
    reason = recurrent(base.model)
    if reason is None:
        together = Together(base)
        reason = _fault(together, base) or window_untold(base.model, together.windows)
        if reason is None:
            return together, None
    fault = _fault(OneByOne(base, in_chunks=True), base)
    return OneByOne(base, in_chunks=fault is None), reason


_LENGTHS = ((5, 7), (6, 12), (7, 13))
"""Tokens of the two rows of a trial after each of its steps: prompts, chunks, single tokens."""


@torch.inference_mode()
def _fault(forward: Forward, base: Base) -> str | None:
    """Return why a forward pass is incorrect for a model; None if it is correct."""
    size = base.model.config.get_text_config().vocab_size
    rows = [[n * factor % size for n in range(1, 14)] for factor in (7919, 104729)]
    caches, before = [forward.new_cache() for _ in rows], (0, 0)
    try:
        expected = [_without_cache(base, row) for row in rows]
        for lengths in _LENGTHS:
            parts = zip(caches, rows, before, lengths, strict=True)
            found = forward([New(cache, None, row[a:b]) for cache, row, a, b in parts])
            wanted = [each[stop - 1] for each, stop in zip(expected, lengths, strict=True)]
            distance = relative_distance(found, torch.stack(wanted))
            if not distance <= tolerance(base.model):
                return f"logits {distance:.1e} from those without a cache"
            before = lengths
    except NOT_UNDERSTOOD as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}"
    return None


def _without_cache(base: Base, row: list[int]) -> torch.Tensor:
    out = base([New(None, None, row)], attention=base.attention, use_cache=False)
    logits_TV: torch.Tensor = out.logits[0]
    return logits_TV


def _shares(news: Sequence[New]) -> tuple[Shares, Shares]:
    """Return the adapters of all tokens, and of the last token of each row."""
    every, last = [], []
    for name, group in itertools.groupby(news, lambda new: new.adapter):
        counts = [len(new.tokens) for new in group]
        every.append((name, sum(counts)))
        last.append((name, len(counts)))
    return every, last
