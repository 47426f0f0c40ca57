"""Lay out a batch as tensors: documents concatenated, or in padded rows.

Concatenation has no padding; attention.py separates the documents. Documents that begin alike, such
as the choices after a question, can have their common tokens once. Padded rows work for every
model: in a causal model real positions never see the padding to their right, so no mask is needed,
and rows are independent, in attention and in recurrent state.

Shape legend: T tokens, N documents, L longest document, K scored positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vox_core.contract import Batch, Floats, Ints, padded_groups

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


LEAST_SHARED = 16
"""First tokens that documents have in common before these are computed once."""

_SCORES = 4
"""Attention scores of a family, at most this many times those of its documents one by one."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The scored positions of a batch: the trained ones, in token order, and then the others.

    Args:
        positions_K: int64 numpy, in the batch.
        targets_K: int64, (K,) or (K, M).
        weights_K: float32, of the same shape.
        trained: number of positions where a weight is not 0.
    """

    positions_K: Ints
    targets_K: torch.Tensor
    weights_K: torch.Tensor
    trained: int

    def scaled(self, scale: float) -> Scored:
        """Return a copy with other weights."""
        return self if scale == 1 else replace(self, weights_K=self.weights_K * scale)


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities (K,) or (K, M) at positions of a batch, in float32 or wider, on the
    device."""

    positions_K: Ints
    log_probs_K: torch.Tensor

    def spread(self, length: int) -> Floats:
        """Return them as float32 numpy over all positions of the batch; 0 elsewhere."""
        import numpy as np

        log_probs_T = np.zeros((length, *self.log_probs_K.shape[1:]), np.float32)
        log_probs_T[self.positions_K] = self.log_probs_K.detach().float().cpu().numpy()
        return log_probs_T


@dataclass(frozen=True, slots=True)
class Rows:
    """Documents as padded rows.

    Args:
        tokens_NL: int64, padded with 0.
        chosen_K: int64, the scored positions, indexed over all rows.
    """

    tokens_NL: torch.Tensor
    chosen_K: torch.Tensor
    scored: Scored


@dataclass(frozen=True, slots=True)
class Extents:
    """Offsets of the documents in a row of T tokens, for attention on host and device.

    Args:
        bounds: N + 1 offsets, Python integers.
        bounds_N1: the same, int32, on the device.
        longest: positions of the longest document.
        windows: the windows passed to the layers' attention, recorded in the forward pass; None if
            there was none.
        back: of documents with branches: how many positions before each token (row) every token
            (column) is, int64 (L, L); negative where it does not see it.
    """

    bounds: tuple[int, ...]
    bounds_N1: torch.Tensor
    longest: int
    windows: set[int | None] = field(default_factory=set)
    back: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def lengths(self) -> list[int]:
        """Number of tokens of each document."""
        return [stop - start for start, stop in itertools.pairwise(self.bounds)]


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """Documents concatenated to a single row.

    Args:
        tokens_1T: int64.
        positions_1T: int64; each document counts from 0.
        chosen_K: int64, the scored positions.
    """

    tokens_1T: torch.Tensor
    positions_1T: torch.Tensor
    chosen_K: torch.Tensor
    extents: Extents
    scored: Scored


def rows(batch: Batch, device: str) -> Rows:
    """Lay out a batch as padded rows."""
    import numpy as np

    documents = list(batch.documents())
    longest = max(d.stop - d.start for d in documents)
    tokens_NL = np.zeros((len(documents), longest), np.int64)
    place_T = np.zeros(len(batch.tokens_T), np.int64)
    for row, document in enumerate(documents):
        length = document.stop - document.start
        tokens_NL[row, :length] = batch.tokens_T[document]
        place_T[document] = np.arange(length) + row * longest
    scored = scored_of(batch, device)
    return Rows(on(device, tokens_NL), on(device, place_T[scored.positions_K]), scored)


def end_to_end(batch: Batch, device: str) -> EndToEnd:
    """Lay out a batch as concatenated documents."""
    import numpy as np

    documents = list(batch.documents())
    bounds = np.asarray([*batch.starts_D, len(batch.tokens_T)], np.int32)
    positions_T = np.concatenate([np.arange(d.stop - d.start) for d in documents])
    longest = max(d.stop - d.start for d in documents)
    scored = scored_of(batch, device)
    return EndToEnd(
        tokens_1T=on(device, batch.tokens_T[None]),
        positions_1T=on(device, positions_T[None]),
        chosen_K=on(device, scored.positions_K),
        extents=Extents(tuple(bounds.tolist()), on(device, bounds), longest),
        scored=scored,
    )


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the documents of several batches as one batch."""
    import numpy as np

    counts = [len(each.tokens_T) for each in batches]
    first = np.cumsum([0, *counts[:-1]])
    starts_D = np.concatenate([n + each.starts_D for n, each in zip(first, batches, strict=True)])
    return Batch(
        np.concatenate([each.tokens_T for each in batches]),
        np.concatenate([each.targets_T for each in batches]),
        np.concatenate([each.weights_T for each in batches]),
        starts_D,
        np.concatenate([each.scored_T for each in batches]),
    )


def begun_alike(batch: Batch, device: str) -> EndToEnd:
    """Lay out documents that begin alike as one, with their common tokens once.

    A document that has `LEAST_SHARED` tokens (or all, where documents are shorter) and half of its
    own in common with the first of a family is a branch of it: what follows the common tokens comes
    after those of the family. With fewer, such as a system prompt before long messages, or in a
    large family, attention over the whole family would cost more than is saved: it takes the square
    of its tokens.
    """
    import numpy as np

    families: list[list[tuple[slice, int]]] = []
    newest: dict[bytes, list[tuple[slice, int]]] = {}
    for document in batch.documents():
        tokens_L = batch.tokens_T[document]
        begun = tokens_L[:LEAST_SHARED].tobytes()
        family = newest.get(begun, [])
        shared = _common(batch.tokens_T[family[0][0]], tokens_L) if family else 0
        if 2 * shared < len(tokens_L) or _too_large([*family, (document, shared)]):
            shared, family = 0, []
        if not family:
            families.append(family)
            newest[begun] = family
        family.append((document, shared))
    place_T, bounds, parts, back = np.zeros(len(batch.tokens_T), np.int64), [0], [], {}
    for number, family in enumerate(families):
        order_L, positions_L, back_LL = _branches(family)
        parts.append((order_L, positions_L))
        place_T[order_L] = bounds[-1] + np.arange(len(order_L))
        for document, shared in family:
            place_T[document.start :][:shared] = bounds[-1] + np.arange(shared)
        bounds.append(bounds[-1] + len(order_L))
        if len(family) > 1:
            back[number] = on(device, back_LL)
    order_T, positions_T = (np.concatenate(each) for each in zip(*parts, strict=True))
    scored = scored_of(batch, device)
    bounds_N1 = on(device, np.asarray(bounds, np.int32))
    longest = int(positions_T.max()) + 1
    return EndToEnd(
        tokens_1T=on(device, batch.tokens_T[order_T][None]),
        positions_1T=on(device, positions_T[None]),
        chosen_K=on(device, place_T[scored.positions_K]),
        extents=Extents(tuple(bounds), bounds_N1, longest, back=back),
        scored=scored,
    )


def _too_large(family: Sequence[tuple[slice, int]]) -> bool:
    lengths = [document.stop - document.start for document, _ in family]
    tokens = sum(lengths) - sum(shared for _, shared in family)
    return tokens**2 > _SCORES * sum(length**2 for length in lengths)


def _common(first: Ints, second: Ints) -> int:
    """Return how many first tokens are equal."""
    import numpy as np

    most = min(len(first), len(second))
    unequal = np.flatnonzero(first[:most] != second[:most])
    return int(unequal[0]) if len(unequal) else most


def _branches(family: Sequence[tuple[slice, int]]) -> tuple[Ints, Ints, Ints]:
    """Return the batch's indices of a family's tokens, their positions, and `Extents.back`.

    Args:
        family: documents, with how many tokens they have in common with the first one.
    """
    import numpy as np

    starts = [document.start + shared for document, shared in family]
    counts = [document.stop - start for (document, _), start in zip(family, starts, strict=True)]
    branch_L = np.repeat(np.arange(len(family)), counts)
    shared_L = np.repeat([shared for _, shared in family], counts)
    order_L = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    positions_L = order_L - np.repeat([document.start for document, _ in family], counts)
    common_LL = (branch_L == 0) & (positions_L < shared_L[:, None])
    seen_LL = common_LL | (branch_L == branch_L[:, None])
    return order_L, positions_L, np.where(seen_LL, positions_L[:, None] - positions_L, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some documents of a batch, and the positions (int64) that they have there."""

    batch: Batch
    positions: Ints


def whole(batch: Batch) -> Part:
    """Return a batch as its only part."""
    import numpy as np

    return Part(batch, np.arange(len(batch.tokens_T)))


def in_rows(batch: Batch, tokens: int) -> list[Part]:
    """Split a batch into single documents, or groups of at most `tokens` padded positions."""
    lengths = [document.stop - document.start for document in batch.documents()]
    return [_part(whole(batch), group) for group in padded_groups(lengths, tokens)]


def halves(part: Part) -> list[Part]:
    """Split a part in two with about the same number of tokens; a single document cannot be
    split."""
    starts = part.batch.starts_D.tolist()
    if len(starts) == 1:
        return [part]
    middle = len(part.batch.tokens_T) / 2
    cut = min(range(1, len(starts)), key=lambda index: abs(starts[index] - middle))
    return [_part(part, range(cut)), _part(part, range(cut, len(starts)))]


def _part(part: Part, chosen: Sequence[int]) -> Part:
    import numpy as np

    batch, documents = part.batch, list(part.batch.documents())
    extents = [documents[index] for index in chosen]
    at = np.concatenate([np.arange(each.start, each.stop) for each in extents])
    bounds = np.cumsum([0, *(each.stop - each.start for each in extents)], dtype=np.int64)
    some = Batch(
        batch.tokens_T[at],
        batch.targets_T[at],
        batch.weights_T[at],
        bounds[:-1],
        batch.scored_T[at],
    )
    return Part(some, part.positions[at])


def on(device: str, array: NDArray[Any]) -> torch.Tensor:
    """Copy an array to the device, from pinned memory, without waiting."""
    import numpy as np
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def scored_of(batch: Batch, device: str) -> Scored:
    """Return the scored positions of a batch."""
    import numpy as np

    trained_T, scored_T = batch.trained_T, batch.scored_T
    if scored_T.ndim > 1:
        scored_T = scored_T.any(1)
    trained, others = np.flatnonzero(trained_T), np.flatnonzero(scored_T & ~trained_T)
    positions_K = np.concatenate([trained, others])
    targets_K, weights_K = batch.targets_T[positions_K], batch.weights_T[positions_K]
    return Scored(positions_K, on(device, targets_K), on(device, weights_K), len(trained))
