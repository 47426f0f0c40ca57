"""Compute the loss of a batch, with documents concatenated or in padded rows.

Concatenation is faster: no padding, and logits by chunks. trial.py decides which layout a model
gets.

This module imports torch; import it lazily.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from vox_core.contract import Batch
from vox_torch.layout import EndToEnd, end_to_end, rows
from vox_torch.loss import HeadLoss, negative_log_likelihood, nll, weighted_nll

if TYPE_CHECKING:
    from peft import PeftModel


class Loss(Protocol):
    """The function from a batch to its loss."""

    def __call__(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        """Return `scale * sum(weight * nll)`, a scalar in float32 or wider.

        Args:
            scale: loss scale, since float16 overflows at 65504.
        """
        ...

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Return (K,) log p(target) at the trained positions, in float32 or wider."""
        ...


class Padded:
    """The reference layout: padded rows, and all logits at once."""

    def __init__(self, model: PeftModel, device: str) -> None:
        self._model, self._device = model, device
        self._head = model.get_output_embeddings()

    def __call__(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        return weighted_nll(self._model, self._head, rows(batch, self._device)) * scale

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Return (K,) log p(target) at the trained positions, in float32 or wider."""
        return -nll(self._model, self._head, rows(batch, self._device))

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return (K, H) before the head, at the trained positions."""
        laid = rows(batch, self._device)
        with _watched(self._model.get_base_model().base_model) as seen:
            self._model(input_ids=laid.tokens_NL, use_cache=False)
        return _chosen(_only_one(seen), laid.chosen_K)


class Together:
    """The fast layout: concatenated documents, and logits by chunks."""

    def __init__(self, model: PeftModel, device: str) -> None:
        self._model, self._device = model.get_base_model(), device
        self._body = self._model.base_model
        below = {id(p) for p in self._body.parameters()}
        above = [p for p in self._model.parameters() if p.requires_grad and id(p) not in below]
        vocabulary = self._model.config.get_text_config().vocab_size
        self._head_loss = HeadLoss(self.logits, above, vocabulary)
        self._output: type[Any] = BaseModelOutputWithPast  # or the family's own, once seen
        self.windows: set[int | None] = set()

    def __call__(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        laid = end_to_end(batch, self._device)
        return self._head_loss(self._hidden(laid), laid.trained.scaled(scale))

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Return (K,) log p(target) at the trained positions, in float32 or wider."""
        laid = end_to_end(batch, self._device)
        logits_KV = self.logits(self._hidden(laid)[None])[0]
        return -negative_log_likelihood(logits_KV, laid.trained.targets_K)

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return (K, H) before the head, at the trained positions."""
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
        out = _only_one(seen)
        self._output = type(out)
        return _chosen(out, laid.chosen_K)

    def logits(self, hidden_1CH: torch.Tensor) -> torch.Tensor:
        """Return (1, C, V) from the model's own forward, which scales and caps logits as the family
        does.

        Meanwhile a module that returns `hidden_1CH` replaces the model's body.
        """
        tokens_1C = hidden_1CH.new_zeros(hidden_1CH.shape[:2], dtype=torch.int64)
        out, place = self._output(last_hidden_state=hidden_1CH), self._model.base_model_prefix
        self._model.set_submodule(place, _Given(out))
        try:
            logits_1CV: torch.Tensor = self._model(input_ids=tokens_1C, use_cache=False).logits
        finally:
            self._model.set_submodule(place, self._body)
        return logits_1CV


@contextmanager
def _watched(body: nn.Module, keep: int | None = None) -> Iterator[list[Any]]:
    """Capture the output of `body`, and pass the head the hidden states at `keep`."""
    seen: list[Any] = []

    def watch(_module: nn.Module, _args: object, out: Any) -> Any:
        seen.append(out)
        return replace(out, last_hidden_state=out.last_hidden_state[:, :keep])

    handle = body.register_forward_hook(watch)
    try:
        yield seen
    finally:
        handle.remove()


def _only_one(seen: list[Any]) -> Any:
    if len(seen) != 1:
        raise NotImplementedError(f"a model whose body is called {len(seen)} times")
    return seen[0]


def _chosen(out: Any, chosen_K: torch.Tensor) -> torch.Tensor:
    hidden_KH: torch.Tensor = out.last_hidden_state.flatten(0, 1).index_select(0, chosen_K)
    return hidden_KH


class _Given(nn.Module):
    """A body that ignores its input and returns `out`."""

    def __init__(self, out: object) -> None:
        super().__init__()
        self._out = out

    def forward(self, *_args: object, **_named: object) -> object:
        return self._out
