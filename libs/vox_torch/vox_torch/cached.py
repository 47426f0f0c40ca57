"""Keys and values of a running batch's rows, and attention of new tokens over them.

The new tokens of all rows are concatenated to one sequence, as documents are in training. Each row
appends its keys and values to buffers of its own, so rows enter and leave without padding or
copies. On an accelerator in half precision one variable-length kernel of torch computes all rows;
elsewhere each row goes through scaled dot product attention.

Shape legend: T new tokens of all rows, N new tokens of a row, L its tokens with the cached ones,
H query heads, K key heads, G query heads per key head, D features of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vox_torch.attention import capped, has_varlen, require_known, sdpa, varlen, within

if TYPE_CHECKING:
    import torch
    from torch import nn

CACHED_ROWS = "vox_cached_rows"

_GROWTH = 256
"""Tokens by which a buffer grows."""


def register() -> None:
    """Register `CACHED_ROWS` with transformers; repeated calls do no harm."""
    from transformers import AttentionInterface

    AttentionInterface.register(CACHED_ROWS, attend)


class RowCache:
    """Keys and values of one row for each attention module.

    Attributes:
        length: tokens cached; raised once every module has appended the same new ones, so a
            forward pass that fails can be repeated.
    """

    def __init__(self) -> None:
        self.length = 0
        self._buffers: dict[nn.Module, list[torch.Tensor]] = {}

    def append(self, module: nn.Module, *new: torch.Tensor) -> list[torch.Tensor]:
        """Write new keys and values, each (N, K, D), behind the cached ones; return both whole."""
        stop = self.length + len(new[0])
        buffers = self._buffers.get(module)
        if buffers is None or len(buffers[0]) < stop:
            buffers = self._buffers[module] = self._grown(buffers, new, stop)
        for buffer, part in zip(buffers, new, strict=True):
            buffer[self.length : stop] = part
        return [buffer[:stop] for buffer in buffers]

    def begin_as(self, other: RowCache, count: int) -> None:
        """Copy the first `count` tokens of another row; this one is empty."""
        for module, buffers in other._buffers.items():
            self._buffers[module] = self._grown(None, buffers, count)
            for buffer, part in zip(self._buffers[module], buffers, strict=True):
                buffer[:count] = part[:count]
        self.length = count

    def _grown(
        self, old: Sequence[torch.Tensor] | None, new: Sequence[torch.Tensor], stop: int
    ) -> list[torch.Tensor]:
        size = -(-stop // _GROWTH) * _GROWTH
        grown = [part.new_empty((size, *part.shape[1:])) for part in new]
        for buffer, kept in zip(grown, old or (), strict=False):
            buffer[: self.length] = kept[: self.length]
        return grown


class RowExtents:
    """Offsets of the rows in T new tokens, and the rows' caches.

    Args:
        counts: new tokens of each row.

    Attributes:
        windows: the windows passed to the layers' attention, recorded in the forward pass.
    """

    def __init__(self, caches: Sequence[RowCache], counts: Sequence[int], device: str) -> None:
        self.caches, self.counts, self._device = caches, counts, device
        self.lengths = [cache.length + n for cache, n in zip(caches, counts, strict=True)]
        self.windows: set[int | None] = set()

    def positions(self) -> list[int]:
        """Return the position of each new token in its row."""
        both = zip(self.lengths, self.counts, strict=True)
        return [position for stop, n in both for position in range(stop - n, stop)]

    def commit(self) -> None:
        """Count the new tokens as cached, after a whole forward pass."""
        for cache, length in zip(self.caches, self.lengths, strict=True):
            cache.length = length

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets of each row's new tokens, and of its keys, int32 on the device."""
        return self._bounds

    @cached_property
    def _bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        new, whole = (
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=self._device)
            for each in (self.counts, self.lengths)
        )
        return new, whole


def attend(
    module: nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rows: RowExtents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface; returns (1, T, H, D), and no weights.

    Raises:
        NotImplementedError: the model needs more than causal attention with a window.
    """
    import torch

    require_known(module, attention_mask, others)
    rows.windows.add(sliding_window)
    scale = query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
    query_THD, key_TKD, value_TKD = (
        each[0].transpose(0, 1) for each in (query_1HTD, key_1KTD, value_1KTD)
    )
    parts = zip(key_TKD.split(rows.counts), value_TKD.split(rows.counts), strict=True)
    seen = [cache.append(module, *new) for cache, new in zip(rows.caches, parts, strict=True)]
    if softcap is None and has_varlen(query_1HTD, key_1KTD):
        keys_LKD, values_LKD = (torch.cat(each) for each in zip(*seen, strict=True))
        new, whole = rows.bounds()
        longest = max(rows.counts), max(rows.lengths)
        window = sliding_window or None
        out = varlen(query_THD, keys_LKD, values_LKD, (new, whole), longest, scale, window)
        return out[None], None
    queries = query_THD.split(rows.counts)
    each_row = [
        _attend_row(query_NHD, *kv, scale, sliding_window or None, softcap)
        for query_NHD, kv in zip(queries, seen, strict=True)
    ]
    return torch.cat(each_row)[None], None


def _attend_row(
    query_NHD: torch.Tensor,
    key_LKD: torch.Tensor,
    value_LKD: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Return (N, H, D): the last N of L positions, each over itself and all before it."""
    count, length = len(query_NHD), len(key_LKD)
    if window and length > window + count - 1:
        key_LKD, value_LKD = (each[1 - window - count :] for each in (key_LKD, value_LKD))
        length = len(key_LKD)
    key_1KLD, value_1KLD = (each.transpose(0, 1)[None] for each in (key_LKD, value_LKD))
    if count == 1 and softcap is None:
        # The queries of a group see the same keys: they are positions of one head.
        query_1KGD = query_NHD.reshape(1, key_1KLD.shape[1], -1, query_NHD.shape[-1])
        out_1KGD = sdpa(query_1KGD, key_1KLD, value_1KLD, scale, None, causal=False)
        return out_1KGD.reshape(1, query_NHD.shape[1], -1)
    query_1HND = query_NHD.transpose(0, 1)[None]
    masked = softcap is not None or count < length or (window is not None and window < length)
    seen_NL = within(count, length, window, query_NHD) if masked else None
    if softcap is None:
        out_1HND = sdpa(query_1HND, key_1KLD, value_1KLD, scale, seen_NL)
    else:
        out_1HND = capped(query_1HND, key_1KLD, value_1KLD, scale, seen_NL, softcap)
    return out_1HND[0].transpose(0, 1)
