"""How the documents of a step share micro-batches.

A backend lays a micro-batch out as rows, padded to the longest, or end to end. What it computes at
once is bounded by `micro_batch_tokens` either way: positions there, tokens here. A document that is
longer has a micro-batch to itself. Which documents a step has, and so what it learns, is not
decided here.

End to end, no more packs are made than best-fit decreasing finds (Johnson 1973: at most 11/9 of the
fewest possible, and one): the longest document first, each into the fullest pack that has room for
it. Where neighbours in length fit into as few packs, they share them: attention works on documents
of a pack together, for as long as the longest of them takes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from vox_core.contract import Packing, padded_groups


def grouped(lengths: Sequence[int], micro_batch_tokens: int, packing: Packing) -> list[list[int]]:
    """The documents of each micro-batch, by index; each stands in one of them, longest first.

    Args:
        lengths: tokens of each document.
    """
    if packing == "rows":
        return padded_groups(lengths, micro_batch_tokens)
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    alike = _neighbours(lengths, longest_first, micro_batch_tokens)
    fewest = -(-sum(min(n, micro_batch_tokens) for n in lengths) // micro_batch_tokens)
    if len(alike) <= fewest:
        return alike
    best = _best_fit(lengths, longest_first, micro_batch_tokens)
    return best if len(best) < len(alike) else alike


def _neighbours(lengths: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Filled one after the other."""
    packs: list[list[int]] = []
    left = 0
    for index in order:
        if packs and lengths[index] <= left:
            packs[-1].append(index)
        else:
            packs.append([index])
            left = room
        left -= lengths[index]
    return packs


def _best_fit(lengths: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Each into the fullest pack that has room for it, of equals the first."""
    packs: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, number of the pack), in order
    for index in order:
        length = lengths[index]
        at = bisect_left(left, (length, 0))
        if at == len(left):
            packs.append([])
            found, pack = room, len(packs) - 1
        else:
            found, pack = left.pop(at)
        packs[pack].append(index)
        if found > length:
            insort(left, (found - length, pack))
    return packs
