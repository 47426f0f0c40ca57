"""Keys and values of a running batch's rows, and attention of new tokens over them.

The new tokens of all rows are concatenated to one sequence, as documents are in training. Each row
appends its keys and values to buffers of its own. Rows of similar length that each get one token
lie side by side in slots of shared buffers, and are computed at once. The others go through one
variable-length kernel of torch, on an accelerator in half precision, and each through scaled dot
product attention alone elsewhere.

Shape legend: T new tokens of all rows, N new tokens of a row or rows with one new token, L tokens
with the cached ones, C tokens that fit, S slots, H query heads, K key heads, G query heads per key
head, D features of a head.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vox_torch.attention import capped, has_varlen, require_known, sdpa, varlen, within

if TYPE_CHECKING:
    import torch
    from torch import nn

CACHED_ROWS = "vox_cached_rows"

_GROWTH = 256
"""Tokens by which a buffer grows."""

_STEP = 16
"""Keys seen in slots are a multiple, as capacities are: torch's kernel on a GPU would copy another
mask."""

_FEW = 4
"""Rows of one capacity from which slots are faster than row by row."""


def register() -> None:
    """Register `CACHED_ROWS` with transformers; repeated calls do no harm."""
    from transformers import AttentionInterface

    AttentionInterface.register(CACHED_ROWS, attend)


class RowCache:
    """Keys and values of one row for each attention module.

    Attributes:
        length: tokens cached; raised once every module has appended the same new ones, so a
            forward pass that fails can be repeated.
        buffers: keys and values of each module, (K, C, D): a head's lie together in memory; in
            slots, parts of their buffers.
        slots: the row's slots, if it is in some, and `slot` its number there.
    """

    def __init__(self) -> None:
        self.length, self.slot = 0, 0
        self.buffers: dict[nn.Module, list[torch.Tensor]] = {}
        self.slots: Slots | None = None

    def append(self, module: nn.Module, *new: torch.Tensor) -> list[torch.Tensor]:
        """Write new keys and values, each (K, N, D), behind the cached ones; return both whole."""
        stop = self.length + new[0].shape[1]
        buffers = self.buffers.get(module)
        if buffers is None or buffers[0].shape[1] < stop:
            buffers = self.buffers[module] = self._grown(buffers, new, stop)
        for buffer, part in zip(buffers, new, strict=True):
            buffer[:, self.length : stop] = part
        return [buffer[:, :stop] for buffer in buffers]

    def begin_as(self, other: RowCache, count: int) -> None:
        """Copy the first `count` tokens of another row; this one is empty."""
        self.length = count
        self.buffers = {
            module: self._grown(buffers, buffers, count)
            for module, buffers in other.buffers.items()
        }

    def _grown(
        self, old: Sequence[torch.Tensor] | None, new: Sequence[torch.Tensor], stop: int
    ) -> list[torch.Tensor]:
        size = -(-stop // _GROWTH) * _GROWTH
        grown = [part.new_empty((len(part), size, part.shape[2])) for part in new]
        for buffer, kept in zip(grown, old or (), strict=False):
            buffer[:, : self.length] = kept[:, : self.length]
        return grown

    def free(self) -> None:
        """Forget keys and values; the row's slot is free."""
        if self.slots:
            self.slots.rows[self.slot], self.slots = None, None
        self.buffers = {}

    def leave_slots(self) -> None:
        """Copy keys and values to buffers of the row's own."""
        if self.slots:
            self.slots.rows[self.slot], self.slots = None, None
            self.buffers = {
                module: self._grown(buffers, buffers, self.length)
                for module, buffers in self.buffers.items()
            }


class Slots:
    """Rows of one capacity, side by side in the buffers (S, K, C, D) of each attention module.

    Attributes:
        rows: in each slot; None in a free one.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[RowCache | None] = []
        self.buffers: dict[nn.Module, list[torch.Tensor]] = {}

    def enter(self, cache: RowCache, wanted: int) -> None:
        """Move a row into a free slot; if there is none, make room for at least `wanted` rows."""
        if None not in self.rows:
            self._grow(cache, wanted)
        slot = self.rows.index(None)
        for module, parts in cache.buffers.items():
            for buffer, part in zip(self.buffers[module], parts, strict=True):
                buffer[slot, :, : cache.length] = part[:, : cache.length]
                buffer[slot, :, cache.length :] = 0  # finite, where the mask hides them
        self._put(cache, slot)

    def _grow(self, cache: RowCache, wanted: int) -> None:
        before = len(self.rows)
        self.rows += [None] * max(wanted - before, before // 2)
        for module, parts in cache.buffers.items():
            size = len(self.rows)
            grown = [p.new_zeros((size, len(p), self.capacity, p.shape[2])) for p in parts]
            for buffer, old in zip(grown, self.buffers.get(module, ()), strict=False):
                buffer[:before] = old
            self.buffers[module] = grown
        for slot, row in enumerate(self.rows[:before]):
            if row:
                self._put(row, slot)

    def _put(self, cache: RowCache, slot: int) -> None:
        self.rows[slot], cache.slots, cache.slot = cache, self, slot
        cache.buffers = {
            module: [buffer[slot] for buffer in buffers] for module, buffers in self.buffers.items()
        }


class SlotsByCapacity:
    """The slots of a running batch. Capacities are powers of two, so at most half is masked; at
    most half of the slots are free. So they have room for up to four times the cached tokens."""

    def __init__(self) -> None:
        self._slots: dict[int, Slots] = {}

    def hold(self, rows: Sequence[RowCache]) -> None:
        """Let slots hold those of the rows that are enough of one capacity, and no others.

        Args:
            rows: with cached tokens; each gets one more in the next step.
        """
        capacities = {row: max(_GROWTH, 1 << row.length.bit_length()) for row in rows}
        counts = Counter(capacities.values())
        wanted = {row: size for row, size in capacities.items() if counts[size] >= _FEW}
        for size, slots in list(self._slots.items()):
            if 2 * counts[size] < len(slots.rows):
                del self._slots[size]  # the rows enter fewer slots
            for row in filter(None, list(slots.rows)):
                if size not in self._slots or wanted.get(row) != size:
                    row.leave_slots()
        for row, size in wanted.items():
            if row.slots is None:
                self._slots.setdefault(size, Slots(size)).enter(row, counts[size])


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

    @cached_property
    def alone(self) -> list[tuple[RowCache, slice]]:
        """The rows that are not in slots, with their new tokens."""
        return [(cache, part) for cache, part in self.parts() if not cache.slots]

    @cached_property
    def ragged(self) -> Ragged:
        """The same, for the variable-length kernel."""
        return Ragged(self.alone, self._device)

    @cached_property
    def together(self) -> list[SideBySide]:
        """The rows in slots."""
        found: dict[Slots, list[tuple[RowCache, int]]] = {}
        for cache, part in self.parts():
            if cache.slots:
                found.setdefault(cache.slots, []).append((cache, part.start))
        return [SideBySide(slots, rows, self._device) for slots, rows in found.items()]

    def parts(self) -> Iterator[tuple[RowCache, slice]]:
        """Each row with its new tokens."""
        stops = itertools.accumulate(self.counts)
        for cache, n, stop in zip(self.caches, self.counts, stops, strict=True):
            yield cache, slice(stop - n, stop)


class Ragged:
    """Attention of rows with any number of new tokens, by the variable-length kernel.

    Args:
        rows: each with its new tokens among those of all rows.
    """

    def __init__(self, rows: Sequence[tuple[RowCache, slice]], device: str) -> None:
        import torch

        self._caches = [cache for cache, _ in rows]
        self._counts = [part.stop - part.start for _, part in rows]
        counts = zip(self._caches, self._counts, strict=True)
        lengths = [cache.length + count for cache, count in counts]
        self._longest = max(self._counts), max(lengths)
        places = [place for _, part in rows for place in range(part.start, part.stop)]
        self.at_N = torch.tensor(places, dtype=torch.int64, device=device)
        new, whole = (
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device)
            for each in (self._counts, lengths)
        )
        self._bounds = new, whole

    def attend(
        self, module: nn.Module, qkv: Sequence[torch.Tensor], scale: float, window: int | None
    ) -> torch.Tensor:
        """Append keys and values, and return (N, H, D)."""
        import torch

        query_NHD, *new = qkv
        parts = zip(*(each.transpose(0, 1).split(self._counts, 1) for each in new), strict=True)
        seen = [cache.append(module, *kv) for cache, kv in zip(self._caches, parts, strict=True)]
        kv_LKD = (torch.cat([r.transpose(0, 1) for r in each]) for each in zip(*seen, strict=True))
        return varlen(query_NHD, *kv_LKD, self._bounds, self._longest, scale, window)


class SideBySide:
    """Attention of rows in slots, each with one new token.

    Args:
        rows: each with its index among the new tokens.

    Attributes:
        in_order: whether they fill the slots in their order.
    """

    def __init__(self, slots: Slots, rows: Sequence[tuple[RowCache, int]], device: str) -> None:
        import torch

        self._slots, self._lengths = slots, [row.length for row, _ in rows]
        self.in_order = [row.slot for row, _ in rows] == [*range(len(slots.rows))]
        numbers = [(at, row.slot, row.length) for row, at in rows]
        self.at_N, self._slot_N, self._before_N = torch.tensor(numbers, device=device).unbind(1)
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self, module: nn.Module, qkv: Sequence[torch.Tensor], scale: float, window: int | None
    ) -> torch.Tensor:
        """Append keys and values, and return (N, H, D)."""
        query_NHD, *new = qkv
        buffers = self._slots.buffers[module]
        for buffer_SKCD, part_NKD in zip(buffers, new, strict=True):
            buffer_SKCD[self._slot_N, :, self._before_N] = part_NKD
        if window not in self._masks:
            self._masks[window] = self._mask(window, query_NHD)
        mask_S11L = self._masks[window]
        key_SKLD, value_SKLD = (buffer[:, :, : mask_S11L.shape[-1]] for buffer in buffers)
        shape = len(key_SKLD), key_SKLD.shape[1], -1, query_NHD.shape[-1]
        query_SHD = query_NHD
        if not self.in_order:
            query_SHD = query_NHD.new_zeros((len(key_SKLD), *query_NHD.shape[1:]))
            query_SHD[self._slot_N] = query_NHD
        out_SKGD = sdpa(query_SHD.reshape(shape), key_SKLD, value_SKLD, scale, mask_S11L)
        out_SHD = out_SKGD.flatten(1, 2)
        return out_SHD if self.in_order else out_SHD[self._slot_N]

    def _mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """Return zeros for the keys that each slot's query sees, else -inf, (S, 1, 1, L)."""
        import torch

        before_S1 = self._slot_N.new_full((len(self._slots.rows), 1), -1)
        before_S1[self._slot_N, 0] = self._before_N
        length = -(-(max(self._lengths) + 1) // _STEP) * _STEP
        key_L = torch.arange(length, device=before_S1.device)
        hidden_SL = key_L > before_S1
        if window:
            hidden_SL |= key_L <= before_S1 - window
        mask_SL = like.new_zeros(hidden_SL.shape).masked_fill_(hidden_SL, -torch.inf)
        return mask_SL[:, None, None]


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
    query_THD, key_KTD, value_KTD = query_1HTD[0].transpose(0, 1), key_1KTD[0], value_1KTD[0]
    window = sliding_window or None
    groups: list[SideBySide | Ragged] = [*rows.together] if softcap is None else []
    alone = rows.alone if softcap is None else [*rows.parts()]
    if alone and softcap is None and has_varlen(query_1HTD, key_1KTD):
        groups, alone = [*groups, rows.ragged], []
    if not alone and len(groups) == 1 and len(groups[0].at_N) == len(query_THD):
        # All new tokens, and in their order, since rows are.
        qkv = query_THD, key_KTD.transpose(0, 1), value_KTD.transpose(0, 1)
        return groups[0].attend(module, qkv, scale, window)[None], None
    out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
    for group in groups:
        new = (each[:, group.at_N].transpose(0, 1) for each in (key_KTD, value_KTD))
        qkv = [query_THD[group.at_N], *new]
        out_THD[group.at_N] = group.attend(module, qkv, scale, window)
    for cache, part in alone:
        seen = cache.append(module, key_KTD[:, part], value_KTD[:, part])
        out_THD[part] = _attend_row(query_THD[part], *seen, scale, window, softcap)
    return out_THD[None], None


def _attend_row(
    query_NHD: torch.Tensor,
    key_KLD: torch.Tensor,
    value_KLD: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Return (N, H, D): the last N of L positions, each over itself and all before it."""
    count, length = len(query_NHD), key_KLD.shape[1]
    if window and length > window + count - 1:
        key_KLD, value_KLD = (each[:, 1 - window - count :] for each in (key_KLD, value_KLD))
        length = key_KLD.shape[1]
    key_1KLD, value_1KLD = key_KLD[None], value_KLD[None]
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
