"""Compute the loss of documents at the scored positions only.

Documents become rows, padded on the right: a causal model's real positions never see what lies to
their right, and rows never see one another, in attention or in recurrent state. Where a step is
compiled, lengths are rounded up, so that a run has few shapes. Padding has weight 0.

The output head, of any family, sees the chosen rows and no others, which saves the (T, V) matrix
that dominates memory with today's vocabularies; scaling and soft-capping behind it stay in force.

Shape legend: N documents, L padded length, K scored positions (padded), M targets of a position, H
hidden size, V vocabulary, B terms of a block, P blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
from mlx import nn

from vox_core.errors import ModelError
from vox_mlx.base import HEADS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vox_core.contract import Batch, Ints

BLOCK = 256
LEAST_SAVED = 64
"""Tokens that are worth another forward pass."""


class Rows(NamedTuple):
    """Documents as MLX arrays: `tokens_NL` and `targets_K` int32, `index_K` into N * L, `weights_K`
    float32 with 0 for what pads. Targets and weights are (K,) or (K, M)."""

    tokens_NL: mx.array
    index_K: mx.array
    targets_K: mx.array
    weights_K: mx.array


def rows(
    batch: Batch, documents: Sequence[slice], lengths: int = 1, scored: int = 1
) -> tuple[Rows, Ints]:
    """Lay out documents of a batch as padded rows.

    Args:
        lengths: row lengths are rounded up to a multiple of this.
        scored: and the number of scored positions to a multiple of this.

    Returns:
        The rows, and the scored positions within the batch, unpadded.
    """
    import numpy as np

    length = _up(max(d.stop - d.start for d in documents), lengths)
    tokens_NL = np.zeros((len(documents), length), np.int32)
    index, positions = [], []
    for row, document in enumerate(documents):
        tokens_NL[row, : document.stop - document.start] = batch.tokens_T[document]
        scored_L = batch.scored_T[document]
        found = np.flatnonzero(scored_L if scored_L.ndim == 1 else scored_L.any(1))
        index.append(row * length + found)
        positions.append(document.start + found)
    positions_K = np.concatenate(positions)
    more = (0, _up(len(positions_K), scored) - len(positions_K))
    below = [more, *[(0, 0)] * (batch.targets_T.ndim - 1)]
    made = Rows(
        mx.array(tokens_NL),
        mx.array(np.pad(np.concatenate(index), more).astype(np.int32)),
        mx.array(np.pad(batch.targets_T[positions_K], below).astype(np.int32)),
        mx.array(np.pad(batch.weights_T[positions_K], below)),
    )
    return made, positions_K


def begun_alike(batch: Batch) -> list[tuple[int, list[slice]]]:
    """Group documents with the same tokens before the first scored position, such as the choices
    after a question.

    Returns:
        Groups of documents, and how many of their first tokens to compute once: 0 in the last one,
        of those for which that saves little.
    """
    alike: dict[bytes, list[slice]] = {}
    for document in batch.documents():
        scored_L = batch.scored_T[document].reshape(document.stop - document.start, -1).any(1)
        begun_L = batch.tokens_T[document][: int(scored_L.argmax())]
        alike.setdefault(begun_L.tobytes(), []).append(document)
    others, families = list[slice](), []
    for begun, documents in alike.items():
        count = len(begun) // batch.tokens_T.itemsize
        if count * (len(documents) - 1) < LEAST_SAVED:
            others += documents
        else:
            families.append((count, documents))
    return [*families, (0, others)] if others else families


def nll(logits_KV: mx.array, targets_K: mx.array) -> mx.array:
    """Return `-log p(target)`, shaped as the targets, in float32."""
    logits_KV = logits_KV.astype(mx.float32)
    score_KM = mx.take_along_axis(logits_KV, targets_K.reshape(len(targets_K), -1), axis=1)
    return (logsumexp(logits_KV)[:, None] - score_KM).reshape(targets_K.shape)


def logsumexp(logits_KV: mx.array) -> mx.array:
    """Compute log(sum(exp)) over the vocabulary in two steps.

    On the CPU, MLX adds a row up from left to right, and loses more with each term: 5e-5 of a
    vocabulary of 49k, 5e-4 of one of 262k. Two levels of some hundred terms each lose 1e-6.
    """
    vocabulary = logits_KV.shape[-1]
    more = _up(vocabulary, BLOCK) - vocabulary
    padded_KV = mx.pad(logits_KV, [(0, 0), (0, more)], constant_values=-mx.inf)
    blocks_KPB = padded_KV.reshape(len(logits_KV), -1, BLOCK)
    return mx.logsumexp(mx.logsumexp(blocks_KPB, axis=-1), axis=-1)


def _up(number: int, step: int) -> int:
    return max(1, -(-number // step)) * step


_POSITIONS = ("wpe", "embed_positions", "position_embeddings")


class Chosen:
    """The positions that the head computes: indices into N * L, or None for all."""

    def __init__(self) -> None:
        self.index_K: mx.array | None = None

    def __call__(self, hidden_NLH: mx.array) -> mx.array:
        if self.index_K is None:
            return hidden_NLH
        return hidden_NLH.reshape(-1, hidden_NLH.shape[-1])[self.index_K]


def choose_at_head(model: nn.Module) -> Chosen:
    """Make `model` return logits of shape (K, V), for the positions in the returned `Chosen`.

    Raises:
        ModelError: M002, the model has no recognised output head.
    """
    chosen = Chosen()
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if path.rpartition(".")[2] in HEADS:
            _give_class(module, _calling(type(module), chosen))
            return chosen
    embeddings = [
        module
        for path, module in modules.items()
        if hasattr(module, "as_linear") and path.rpartition(".")[2] not in _POSITIONS
    ]
    if not embeddings:
        raise ModelError(
            "M002",
            "the model has no output head that vox knows",
            remedy="use a torch backend for this model: --backend cpu, or cuda",
        )
    # Some models embed more than tokens; the vocabulary is the largest.
    vocabulary = max(embeddings, key=lambda module: module.weight.shape[0])
    _give_class(vocabulary, _as_linear(type(vocabulary), chosen))
    return chosen


def _calling(base: type[nn.Module], chosen: Chosen) -> type[nn.Module]:
    class Head(base):  # type: ignore[misc, valid-type]
        def __call__(self, hidden_NLH: mx.array) -> Any:
            return super().__call__(chosen(hidden_NLH))

    return Head


def _as_linear(base: type[nn.Module], chosen: Chosen) -> type[nn.Module]:
    class TiedHead(base):  # type: ignore[misc, valid-type]
        def as_linear(self, hidden_NLH: mx.array) -> Any:
            return super().as_linear(chosen(hidden_NLH))

    return TiedHead


def _give_class(module: nn.Module, kind: type[nn.Module]) -> None:
    # Another class for this one object: its place in the tree and its parameters stay.
    module.__class__ = kind
