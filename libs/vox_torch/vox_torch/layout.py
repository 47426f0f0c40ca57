"""Lay out a batch as tensors: documents concatenated, or in padded rows.

Concatenation has no padding; attention.py separates the documents. Padded rows work for every
model: in a causal model real positions never see the padding to their right, so no mask is needed,
and rows are independent, in attention and in recurrent state.

Shape legend: T tokens, N documents, L longest document, K trained positions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vox_core.contract import Batch

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Trained:
    """Targets and weights of a batch's trained positions, in token order.

    Args:
        targets_K: int64.
        weights_K: float32.
    """

    targets_K: torch.Tensor
    weights_K: torch.Tensor

    def scaled(self, scale: float) -> Trained:
        """Return a copy with other weights."""
        return self if scale == 1 else Trained(self.targets_K, self.weights_K * scale)


@dataclass(frozen=True, slots=True)
class Rows:
    """Documents as padded rows.

    Args:
        tokens_NL: int64, padded with 0.
        chosen_K: int64, the positions with weight > 0, indexed over all rows.
    """

    tokens_NL: torch.Tensor
    chosen_K: torch.Tensor
    trained: Trained


@dataclass(frozen=True, slots=True)
class Extents:
    """Offsets of the documents in a row of T tokens, for attention on host and device.

    Args:
        bounds: N + 1 offsets, Python integers.
        bounds_N1: the same, int32, on the device.
        longest: tokens of the longest document.
        windows: the windows passed to the layers' attention, recorded in the forward pass; None if
            there was none.
    """

    bounds: tuple[int, ...]
    bounds_N1: torch.Tensor
    longest: int
    windows: set[int | None] = field(default_factory=set)

    def lengths(self) -> list[int]:
        """Number of tokens of each document."""
        return [stop - start for start, stop in itertools.pairwise(self.bounds)]


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """Documents concatenated to a single row.

    Args:
        tokens_1T: int64.
        positions_1T: int64; each document counts from 0.
        chosen_K: int64, the positions with weight > 0.
    """

    tokens_1T: torch.Tensor
    positions_1T: torch.Tensor
    chosen_K: torch.Tensor
    extents: Extents
    trained: Trained


def rows(batch: Batch, device: str) -> Rows:
    """Lay out a batch as padded rows."""
    import numpy as np

    documents = list(batch.documents())
    longest = max(d.stop - d.start for d in documents)
    tokens_NL = np.zeros((len(documents), longest), np.int64)
    chosen_NL = np.zeros((len(documents), longest), bool)
    for row, document in enumerate(documents):
        length = document.stop - document.start
        tokens_NL[row, :length] = batch.tokens_T[document]
        chosen_NL[row, :length] = batch.weights_T[document] > 0
    chosen_K = np.flatnonzero(chosen_NL)
    return Rows(on(device, tokens_NL), on(device, chosen_K), _trained(batch, device))


def end_to_end(batch: Batch, device: str) -> EndToEnd:
    """Lay out a batch as concatenated documents."""
    import numpy as np

    documents = list(batch.documents())
    bounds = np.asarray([*batch.starts_D, len(batch.tokens_T)], np.int32)
    positions_T = np.concatenate([np.arange(d.stop - d.start) for d in documents])
    longest = max(d.stop - d.start for d in documents)
    return EndToEnd(
        tokens_1T=on(device, batch.tokens_T[None]),
        positions_1T=on(device, positions_T[None]),
        chosen_K=on(device, np.flatnonzero(batch.weights_T > 0)),
        extents=Extents(tuple(bounds.tolist()), on(device, bounds), longest),
        trained=_trained(batch, device),
    )


def on(device: str, array: NDArray[Any]) -> torch.Tensor:
    """Copy an array to the device, from pinned memory, without waiting."""
    import numpy as np
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _trained(batch: Batch, device: str) -> Trained:
    trained_T = batch.weights_T > 0
    return Trained(on(device, batch.targets_T[trained_T]), on(device, batch.weights_T[trained_T]))
