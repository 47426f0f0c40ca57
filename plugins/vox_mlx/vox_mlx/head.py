"""Compute logits at chosen positions only, for any family's output head.

The head sees the chosen rows and no others, which saves the (T, V) matrix that dominates memory
with today's vocabularies; scaling and soft-capping behind it stay in force.

Shape legend: N rows, L positions, K chosen positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vox_core.errors import ModelError
from vox_mlx.base import HEADS

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn

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
