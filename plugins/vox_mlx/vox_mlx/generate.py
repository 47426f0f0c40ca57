"""The running batch: rows of different lengths that enter, decode together, and leave.

A row is computed alone until its prompt is in its cache, one chunk after the other between decoding
steps. From then on the rows of a decoding step share one batch, whose caches are mlx-lm's, padded
on the left. When other rows than before are to take a step, the batch is taken apart into caches
of single rows, and those of the new batch are merged.

Shape legend: T tokens of a prompt, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from vox_core.contract import Floats, Ints

CHUNK, CHUNK_ON_CPU = 512, 128
"""Tokens of prompts that are computed between two decoding steps."""

Cache: TypeAlias = list[Any]
"""A cache of mlx-lm for each layer."""
NextLogits: TypeAlias = Callable[[mx.array, Sequence[str | None], Cache], mx.array]
"""(N, L) tokens, the adapter of each row, their cache -> (N, V) logits; appends to the cache."""


@dataclass(slots=True)
class _Row:
    """A row: its adapter, its length, the part of its prompt that is left, its cache if apart."""

    adapter: str | None
    length: int
    left_T: Ints
    cache: Cache | None


@dataclass(slots=True)
class _Together:
    """The rows of the last decoding step, in the order of their shared cache; None has left."""

    rows: list[int | None] = field(default_factory=list)
    cache: Cache = field(default_factory=list)


class Generation:
    """Rows of a running batch.

    Args:
        new_cache: makes an empty cache for one row.
        next_logits: computes tokens behind a cache.
        lane: of an adapter; only rows with equal lanes are computed together.
    """

    def __init__(
        self,
        new_cache: Callable[[], Cache],
        next_logits: NextLogits,
        lane: Callable[[str | None], str | None],
    ) -> None:
        self._new_cache, self._next_logits, self._lane = new_cache, next_logits, lane
        self._rows: dict[int, _Row] = {}
        self._lanes: dict[str | None, _Together] = {}

    def insert(self, row: int, tokens_T: Ints, adapter: str | None) -> None:
        """Let a row enter, with its prompt still to be computed."""
        self._rows[row] = _Row(adapter, len(tokens_T), tokens_T, self._new_cache())

    def reuse(self, row: int, source: int, count: int) -> bool:
        """Copy the first tokens' cache of another row, where caches can be cut anywhere."""
        cache = self._rows[source].cache
        for lane in self._lanes.values():
            if source in lane.rows:
                cache = _extracted(lane.cache, lane.rows.index(source), len(lane.rows))
        if not can_be_cut(cache):
            return False
        self._rows[row].cache = beginning(cache, count)
        self._rows[row].left_T = self._rows[row].left_T[count:]
        return True

    def length(self, row: int) -> int:
        """Return the number of tokens of a row."""
        return self._rows[row].length

    def advance(self, tokens: Mapping[int, int]) -> dict[int, Floats]:
        """Append a token to each of these rows, and compute a chunk of new prompts."""
        lanes: dict[str | None, list[int]] = {}
        for row in tokens:
            lanes.setdefault(self._lane(self._rows[row].adapter), []).append(row)
        found: dict[int, Floats] = {}
        for lane, rows in lanes.items():
            found |= self._decode(self._lanes.setdefault(lane, _Together()), rows, tokens)
        return found | self._prefill()

    def remove(self, row: int) -> None:
        """Let a row leave; what it has in a shared cache goes with the batch's next change."""
        del self._rows[row]
        for lane in self._lanes.values():
            lane.rows = [None if number == row else number for number in lane.rows]
            if not any(number is not None for number in lane.rows):
                lane.rows, lane.cache = [], []

    def _decode(
        self, lane: _Together, rows: Sequence[int], tokens: Mapping[int, int]
    ) -> dict[int, Floats]:
        rows = sorted(rows)
        self._gather(lane, rows)
        tokens_N1 = mx.array([[tokens[row]] for row in rows])
        names = [self._rows[row].adapter for row in rows]
        logits_NV = self._computed(tokens_N1, names, lane.cache)
        for row in rows:
            self._rows[row].length += 1
        return dict(zip(rows, logits_NV, strict=True))

    def _gather(self, lane: _Together, wanted: list[int]) -> None:
        """Make `wanted` the rows of a lane's shared cache."""
        if wanted == lane.rows:
            return
        for index, row in enumerate(lane.rows):
            if row is not None:
                self._rows[row].cache = _extracted(lane.cache, index, len(lane.rows))
        lane.cache = _merged([self._rows[row].cache for row in wanted])
        lane.rows = [*wanted]
        for row in wanted:
            self._rows[row].cache = None

    def _prefill(self) -> dict[int, Floats]:
        """Compute about a chunk of prompts, the shortest first, and at least half a chunk of the
        oldest; return the logits of those that are complete."""
        left = {number: row for number, row in self._rows.items() if len(row.left_T)}
        if not left:
            return {}
        oldest, *others = left
        chunk = CHUNK if mx.default_device().type == mx.DeviceType.gpu else CHUNK_ON_CPU
        found: dict[int, Floats] = {}
        room = chunk - min(len(left[oldest].left_T), chunk // 2)
        for number in sorted(others, key=lambda number: len(left[number].left_T)):
            room -= self._prefilled(number, room, found)
        self._prefilled(oldest, room + chunk // 2, found)
        return found

    def _prefilled(self, number: int, most: int, found: dict[int, Floats]) -> int:
        """Compute up to so many tokens of a prompt; return how many."""
        row = self._rows[number]
        chunk_T, row.left_T = row.left_T[: max(0, most)], row.left_T[max(0, most) :]
        if len(chunk_T):
            logits_1V = self._computed(mx.array(chunk_T)[None], [row.adapter], row.cache)
            if not len(row.left_T):
                found[number] = logits_1V[0]
        return len(chunk_T)

    def _computed(self, tokens_NL: mx.array, names: Sequence[str | None], cache: Cache) -> Floats:
        logits_NV = self._next_logits(tokens_NL, names, cache).astype(mx.float32)
        mx.eval(logits_NV, [layer.state for layer in cache])
        copy: Floats = np.array(logits_NV)
        return copy


def can_be_cut(cache: Cache) -> bool:
    """Whether a cache can be cut at any token: no layer has a state or a window."""
    from mlx_lm.models.cache import KVCache

    return all(type(layer) is KVCache for layer in cache)


def beginning(cache: Cache, count: int, rows: int = 1) -> Cache:
    """Return a copy of the first `count` tokens of a row's cache, for each of some rows."""
    copies: Cache = [type(layer)() for layer in cache]
    for copy, layer in zip(copies, cache, strict=True):
        if layer.keys is not None:  # of a layer that attends
            copy.offset = count
            copy.keys, copy.values = (
                mx.repeat(each[..., :count, :], rows, axis=0) for each in (layer.keys, layer.values)
            )
    return copies


def _extracted(cache: Cache, index: int, rows: int) -> Cache:
    return cache if rows == 1 else [layer.extract(index) for layer in cache]


def _merged(caches: Sequence[Cache]) -> Cache:
    if len(caches) == 1:
        return caches[0]
    return [layers[0].merge(layers) for layers in zip(*caches, strict=True)]
