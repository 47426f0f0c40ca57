"""Causal attention of concatenated documents in bfloat16 on a CPU, by matrix products.

    S = scale * Q K^T, P = softmax(S), O = P V
    dV = P^T dO, dS = P * (dP - sum(dP * P)) with dP = dO V^T
    dQ = scale * dS K, dK = scale * dS^T Q

S and its softmax are float32, so that large scores lose nothing; P, dP and dS are bfloat16.
The backward pass computes P again, so memory grows with the number of tokens alone. Without AMX,
torch's kernel takes 2 to 4 times as long (docs/dev/performance-log.md).

Documents of about one length are padded to one and computed together, 128 queries at a time, with
the heads that share a key head as one product. All blocks of queries lie one after the other in
slots, so that a block of the queries, of the output and of their gradients is a view. A padded key
lies after every query of its document, so the causal mask hides it; a padded query has no gradient.

This module imports torch; import it lazily.

Shape legend: T tokens, H heads, J key heads, G heads of a key head, D features of a head. In a
group: B documents times J, L tokens of the longest, N queries of a block, M keys that they see; in
three dimensions N counts the queries of G heads. S slots of queries, R slots of keys.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vox_torch.arrays import at_least_float32

_BLOCK = 128
"""Queries of a document at a time."""

_PADDING = 2**12
"""What a group costs beside its arithmetic, in scores of one head: with less padding than this, a
document is cheaper in the group of a longer one than in a group of its own."""

_SCORES = 2**18
"""Most scores of a block of a group: 1 MiB in float32, which stays in the cache. A single document
may have more."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of a group that are computed at once, with the keys that they see.

    Args:
        slots: of its queries, in the order (B, G, N).
        queries, keys: positions in the documents.
    """

    slots: slice
    queries: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class Group:
    """Documents that are computed together.

    Args:
        batch: B, the number of documents times key heads.
        slots: of its keys, in the order (B, L).
    """

    batch: int
    slots: slice
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class SlotIndex:
    """The rows of D features, one for each token and head, that lie in the slots.

    Args:
        rows_S: int64, the row of each slot; in a padded one, that of the document's last token.
        padding: the padded slots.
        slot_of_row: int64, one for each row.
    """

    rows_S: torch.Tensor
    padding: torch.Tensor
    slot_of_row: torch.Tensor

    @staticmethod
    def of(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> SlotIndex:
        """Join (rows, whether padded) of consecutive slots."""
        rows_S, padded_S = (
            torch.cat([each.flatten() for each in both]) for both in zip(*parts, strict=True)
        )
        real = (~padded_S).nonzero().flatten()
        slot_of_row = torch.empty_like(real).index_copy_(0, rows_S[real], real)
        return SlotIndex(rows_S, padded_S.nonzero().flatten(), slot_of_row)

    def gather(self, x_1HTD: torch.Tensor) -> torch.Tensor:
        """Return (S, D)."""
        return _rows(x_1HTD).index_select(0, self.rows_S)

    def restore(self, x_SD: torch.Tensor, heads: int) -> torch.Tensor:
        """Return (1, T, H, D) of what lies in the slots."""
        return x_SD.index_select(0, self.slot_of_row).view(1, -1, heads, x_SD.shape[1])


def _rows(x_1HTD: torch.Tensor) -> torch.Tensor:
    return x_1HTD.transpose(1, 2).reshape(-1, x_1HTD.shape[3])


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups of documents, and where their queries and keys lie."""

    groups: tuple[Group, ...]
    queries: SlotIndex
    keys: SlotIndex


@functools.lru_cache(maxsize=8)
def layout(bounds: tuple[int, ...], heads: int, key_heads: int, window: int | None) -> Layout:
    """Lay out the documents between `bounds`; a query sees at most `window` keys."""
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    head_JG1 = torch.arange(heads).view(key_heads, -1, 1)
    groups, queries, keys = [], [], []
    slot = key_slot = 0
    for chosen in grouped(lengths, heads):
        longest, batch = lengths[chosen[0]], len(chosen) * key_heads
        last_N1 = torch.tensor([[lengths[document] - 1] for document in chosen])
        at_NL = torch.arange(longest).expand(len(chosen), -1)
        token_NL = at_NL.minimum(last_N1) + torch.tensor([[bounds[each]] for each in chosen])
        key_NJL = token_NL[:, None] * key_heads + torch.arange(key_heads)[:, None]
        query_NJGL = token_NL[:, None, None] * heads + head_JG1
        padded_NL = at_NL > last_N1
        blocks = []
        for at in _blocks(longest):
            taken = slice(slot, slot := slot + query_NJGL[..., at].numel())
            first = 0 if window is None else max(0, at.start - window + 1)
            blocks.append(Block(taken, at, slice(first, at.stop)))
            query_NJGL_at = query_NJGL[..., at]
            queries.append((query_NJGL_at, padded_NL[:, None, None, at].expand_as(query_NJGL_at)))
        keys.append((key_NJL, padded_NL[:, None].expand_as(key_NJL)))
        taken = slice(key_slot, key_slot := key_slot + key_NJL.numel())
        groups.append(Group(batch, taken, tuple(blocks)))
    return Layout(tuple(groups), SlotIndex.of(queries), SlotIndex.of(keys))


def grouped(lengths: list[int], heads: int) -> Iterator[list[int]]:
    """Group documents of about one length, the longest of a group first."""
    group: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        longest = lengths[group[0] if group else document]
        scores = (len(group) + 1) * heads * min(longest, _BLOCK) * longest
        if group and (longest**2 - lengths[document] ** 2 > _PADDING or scores > _SCORES):
            yield group
            group = []
        group.append(document)
    yield group


def _blocks(length: int) -> Iterator[slice]:
    return (slice(at, min(at + _BLOCK, length)) for at in range(0, length, _BLOCK))


class CausalAttention(torch.autograd.Function):
    """Attention of documents that each attend to themselves; returns (1, T, H, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        query_1HTD: torch.Tensor,
        key_1JTD: torch.Tensor,
        value_1JTD: torch.Tensor,
        bounds: tuple[int, ...],
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        heads, key_heads = query_1HTD.shape[1], key_1JTD.shape[1]
        laid = layout(bounds, heads, key_heads, window)
        Q_SD, K_RD, V_RD = (
            slots.gather(each)
            for slots, each in (
                (laid.queries, query_1HTD),
                (laid.keys, key_1JTD),
                (laid.keys, value_1JTD),
            )
        )
        ctx.save_for_backward(Q_SD, K_RD, V_RD)
        ctx.laid, ctx.scale, ctx.window, ctx.heads = laid, scale, window, (heads, key_heads)
        O_SD = V_RD.new_empty(len(Q_SD), V_RD.shape[1])
        for group, block, P_BNM in _probabilities(laid, Q_SD, K_RD, scale, window):
            V_BMD = _in_group(group, V_RD)[:, block.keys]
            torch.bmm(P_BNM, V_BMD, out=_in_batch(group, O_SD[block.slots]))
        return laid.queries.restore(O_SD, heads)

    @staticmethod
    def backward(ctx: Any, g_1THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        Q_SD, K_RD, V_RD = ctx.saved_tensors
        laid, (heads, key_heads) = ctx.laid, ctx.heads
        g_SD = laid.queries.gather(g_1THD.transpose(1, 2)).index_fill_(0, laid.queries.padding, 0)
        gQ_SD = torch.empty_like(Q_SD)
        gK_RD, gV_RD = (at_least_float32(torch.zeros_like(each)) for each in (K_RD, V_RD))
        for group, block, P_BNM in _probabilities(laid, Q_SD, K_RD, ctx.scale, ctx.window):
            Q_BND, g_BND = (_in_batch(group, each[block.slots]) for each in (Q_SD, g_SD))
            K_BMD, V_BMD = (_in_group(group, each)[:, block.keys] for each in (K_RD, V_RD))
            gK_BMD, gV_BMD = (_in_group(group, each)[:, block.keys] for each in (gK_RD, gV_RD))
            gV_BMD += P_BNM.transpose(1, 2) @ g_BND
            gP_BNM = g_BND @ V_BMD.transpose(1, 2)
            gS_BNM = torch.ops.aten._softmax_backward_data(gP_BNM, P_BNM, -1, P_BNM.dtype)
            torch.bmm(gS_BNM, K_BMD, out=_in_batch(group, gQ_SD[block.slots]))
            gK_BMD += gS_BNM.transpose(1, 2) @ Q_BND
        gQ_1THD = laid.queries.restore(gQ_SD.mul_(ctx.scale), heads)
        gK_1TJD = laid.keys.restore(gK_RD.mul_(ctx.scale).to(K_RD.dtype), key_heads)
        gV_1TJD = laid.keys.restore(gV_RD.to(V_RD.dtype), key_heads)
        return *(each.transpose(1, 2) for each in (gQ_1THD, gK_1TJD, gV_1TJD)), None, None, None


def _in_group(group: Group, x_RD: torch.Tensor) -> torch.Tensor:
    """Return (B, L, D), a group's keys, values or their gradients, as a view."""
    return _in_batch(group, x_RD[group.slots])


def _in_batch(group: Group, x_SD: torch.Tensor) -> torch.Tensor:
    return x_SD.view(group.batch, -1, x_SD.shape[1])


def _probabilities(
    laid: Layout, Q_SD: torch.Tensor, K_RD: torch.Tensor, scale: float, window: int | None
) -> Iterator[tuple[Group, Block, torch.Tensor]]:
    """Yield P (B, G N, M) in the dtype of Q for each block."""
    for group in laid.groups:
        K_BLD = at_least_float32(_in_group(group, K_RD))
        for block in group.blocks:
            Q_BND = at_least_float32(_in_batch(group, Q_SD[block.slots]))
            S_BNM = _scores(Q_BND, K_BLD[:, block.keys], scale)
            _mask(S_BNM, block, window)
            yield group, block, S_BNM.softmax(-1).to(Q_SD.dtype)


def _scores(Q_BND: torch.Tensor, K_BMD: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `scale * Q K^T`. Both hold bfloat16 numbers, so multiplying in bfloat16
    loses nothing; the sums are float32. A product in float32 takes more than twice as long."""
    none = Q_BND.new_empty(1, 1, 1)
    with _BFLOAT16_PRODUCTS:
        return torch.baddbmm(none, Q_BND, K_BMD.transpose(1, 2), beta=0, alpha=scale)


class _Bfloat16Products:
    """While a thread is inside, oneDNN rounds float32 factors to bfloat16, in all threads."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, ""

    def __enter__(self) -> None:
        settings = torch.backends.mkldnn.matmul
        with self._lock:
            if not self._inside:
                self._before = settings.fp32_precision
            self._inside += 1
            settings.fp32_precision = "bf16"

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:  # of several threads the last one
                torch.backends.mkldnn.matmul.fp32_precision = self._before


_BFLOAT16_PRODUCTS = _Bfloat16Products()


def _mask(S_BNM: torch.Tensor, block: Block, window: int | None) -> None:
    """Add -inf in place where a query does not see a key. Without a window, it sees all keys
    before the block."""
    count = block.queries.stop - block.queries.start
    keys = count if window is None else block.keys.stop - block.keys.start
    hidden = _hidden(count, keys, window)
    S_BNM.unflatten(1, (-1, count))[..., -hidden.shape[1] :].add_(hidden)


@functools.lru_cache(maxsize=8)
def _hidden(count: int, keys: int, window: int | None) -> torch.Tensor:
    """Return (N, M) of 0 and -inf for the last `count` of `keys` positions."""
    query_N1, key_M = torch.arange(keys - count, keys)[:, None], torch.arange(keys)
    hidden_NM = key_M > query_N1
    if window is not None:
        hidden_NM |= key_M <= query_N1 - window
    return torch.zeros(hidden_NM.shape).masked_fill_(hidden_NM, float("-inf"))
