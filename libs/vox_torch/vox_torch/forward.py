"""From a batch to its loss: documents end to end, or in padded rows.

End to end is faster: no padding, and logits by chunks. Which of the two a model gets is decided in
trial.py.

This module imports torch, and is imported when there is a model to compute with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vox_core.contract import Batch
from vox_torch.layout import EndToEnd, end_to_end, rows
from vox_torch.loss import HeadLoss, weighted_nll

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn


class Loss(Protocol):
    """From a batch to its loss."""

    def __call__(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        """`scale * sum(weight * nll)`, a scalar in float32 or wider.

        Args:
            scale: of the gradients, from the first on: float16 ends at 65504.
        """
        ...


class Padded:
    """The reference: rows, and all logits at once."""

    def __init__(self, model: PeftModel, device: str) -> None:
        self._model, self._device = model, device
        self._head = model.get_output_embeddings()

    def __call__(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        return weighted_nll(self._model, self._head, rows(batch, self._device)) * scale

    def hidden(self, batch: Batch) -> torch.Tensor:
        """(K, H) before the head, where the batch is trained."""
        laid = rows(batch, self._device)
        with _watched(self._model.get_base_model().base_model) as seen:
            self._model(input_ids=laid.tokens_NL, use_cache=False)
        return _only_one(seen).flatten(0, 1).index_select(0, laid.chosen_K)


class Together:
    """Documents end to end; logits a chunk at a time."""

    def __init__(self, model: PeftModel, device: str) -> None:
        self._model, self._device = model.get_base_model(), device
        self._body = self._model.base_model
        below = {id(p) for p in self._body.parameters()}
        above = [p for p in self._model.parameters() if p.requires_grad and id(p) not in below]
        vocabulary = self._model.config.get_text_config().vocab_size
        self._head_loss = HeadLoss(self._logits, above, vocabulary)
        self.windows: set[int | None] = set()

    def __call__(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        laid = end_to_end(batch, self._device)
        return self._head_loss(self._hidden(laid), laid.trained.scaled(scale))

    def hidden(self, batch: Batch) -> torch.Tensor:
        """(K, H) before the head, where the batch is trained."""
        return self._hidden(end_to_end(batch, self._device))

    def _hidden(self, laid: EndToEnd) -> torch.Tensor:
        with _watched(self._body, keep=0) as seen:
            self._model(
                input_ids=laid.tokens_1T,
                position_ids=laid.positions_1T,
                documents=laid.extents,
                use_cache=False,
            )
        self.windows = laid.extents.windows
        return _only_one(seen)[0].index_select(0, laid.chosen_K)

    def _logits(self, hidden_1CH: torch.Tensor) -> torch.Tensor:
        """The model's own way from hidden states to logits: its forward, without its body."""
        tokens_1C = hidden_1CH.new_zeros(hidden_1CH.shape[:2], dtype=torch.int64)
        self._body.forward = lambda *_, **__: _Only(hidden_1CH)
        try:
            logits_1CV: torch.Tensor = self._model(input_ids=tokens_1C, use_cache=False).logits
        finally:
            del self._body.forward
        return logits_1CV


@contextmanager
def _watched(body: nn.Module, keep: int | None = None) -> Iterator[list[torch.Tensor]]:
    """The last hidden states of each forward of `body`; what comes after sees `keep` of them."""
    seen: list[torch.Tensor] = []

    def watch(_module: nn.Module, _args: object, out: Any) -> Any:
        seen.append(out.last_hidden_state)
        out.last_hidden_state = out.last_hidden_state[:, :keep]
        return out

    handle = body.register_forward_hook(watch)
    try:
        yield seen
    finally:
        handle.remove()


def _only_one(seen: list[torch.Tensor]) -> torch.Tensor:
    if len(seen) != 1:
        raise NotImplementedError(f"a model whose body is called {len(seen)} times")
    return seen[0]


class _Only(dict[str, Any]):
    """The output of a body that gave hidden states and nothing else, whatever its class is."""

    def __init__(self, hidden_1CH: torch.Tensor) -> None:
        super().__init__(last_hidden_state=hidden_1CH)
        self.last_hidden_state = hidden_1CH

    def __getattr__(self, name: str) -> None:
        """Caches, attentions and whatever else there was none of."""

    def __getitem__(self, key: int | str) -> Any:
        return self.last_hidden_state if key in (0, "last_hidden_state") else None
