"""Compute loss and log-probabilities of a batch, with documents concatenated or in padded rows.

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

from vox_core.contract import Batch, Weigh
from vox_torch.layout import EndToEnd, Scored, Scores, begun_alike, end_to_end, on, rows, scored_of
from vox_torch.loss import HeadLoss, nll, weighted

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Loss(Protocol):
    """The function from a batch to its loss and its log-probabilities."""

    def __call__(
        self, batch: Batch, scale: float = 1.0, weigh: Weigh | None = None
    ) -> tuple[torch.Tensor, Scores]:
        """Return `scale * sum(weight * nll)`, a scalar in float32 or wider, and log p(target) where
        `batch.scored_T`, without a gradient.

        Args:
            scale: loss scale, since float16 overflows at 65504.
            weigh: computes the weights, from the log-probabilities.
        """
        ...

    def log_probs(self, batch: Batch, *, once: bool = False) -> Scores:
        """Return log p(target) where `batch.scored_T`, in float32 or wider.

        Args:
            once: tokens that documents begin with alike may be computed once.
        """
        ...


class Padded:
    """The reference layout: padded rows, and all logits at once."""

    def __init__(self, model: PreTrainedModel, device: str) -> None:
        self._model, self._device = model, device
        self._head = model.get_output_embeddings()

    def __call__(
        self, batch: Batch, scale: float = 1.0, weigh: Weigh | None = None
    ) -> tuple[torch.Tensor, Scores]:
        laid = rows(batch, self._device)
        nll_K = nll(self._model, self._head, laid)
        if weigh is not None:
            return _weighed(nll_K, laid.scored, weigh, len(batch.tokens_T), scale)
        scores = Scores(laid.scored.positions_K, -nll_K.detach())
        return weighted(nll_K, laid.scored) * scale, scores

    def log_probs(self, batch: Batch, *, once: bool = False) -> Scores:
        """Return log p(target) where `batch.scored_T`, in float32 or wider."""
        laid = rows(batch, self._device)
        return Scores(laid.scored.positions_K, -nll(self._model, self._head, laid))

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return (K, H) before the head, at the scored positions."""
        laid = rows(batch, self._device)
        with _watched(self._model.base_model) as seen:
            self._model(input_ids=laid.tokens_NL, use_cache=False)
        return _chosen(_only_one(seen), laid.chosen_K)


class Together:
    """The fast layout: concatenated documents, and logits by chunks."""

    def __init__(self, model: PreTrainedModel, device: str) -> None:
        self._model, self._device = model, device
        self._body = self._model.base_model
        vocabulary = self._model.config.get_text_config().vocab_size
        self._head_loss = HeadLoss(self.logits, vocabulary, device)
        self._output: type[Any] = BaseModelOutputWithPast  # or the family's own, once seen
        self.windows: set[int | None] = set()

    def __call__(
        self, batch: Batch, scale: float = 1.0, weigh: Weigh | None = None
    ) -> tuple[torch.Tensor, Scores]:
        laid = end_to_end(batch, self._device)
        return self.head(self._body_output(laid), batch, laid.scored, scale, weigh)

    def body(self, batch: Batch) -> torch.Tensor:
        """Return (T, H), the hidden states before the head."""
        return self._body_output(end_to_end(batch, self._device))

    def head(
        self,
        hidden_TH: torch.Tensor,
        batch: Batch,
        scored: Scored,
        scale: float = 1.0,
        weigh: Weigh | None = None,
    ) -> tuple[torch.Tensor, Scores]:
        """Return loss and log-probabilities from what `body` returned, as `__call__` does."""
        chosen_K = on(self._device, scored.positions_K)
        parameters = self._above() if torch.is_grad_enabled() else []
        if weigh is not None and not parameters and scored.targets_K.ndim == 1:
            nll_K = self._head_loss.nll(hidden_TH.index_select(0, chosen_K), scored)
            return _weighed(nll_K, scored, weigh, len(batch.tokens_T), scale)
        if weigh is not None:
            log_probs_K = self._head_loss.log_probs(hidden_TH.index_select(0, chosen_K), scored)
            weights_T = weigh(Scores(scored.positions_K, log_probs_K).spread(len(batch.tokens_T)))
            scored = scored_of(replace(batch, weights_T=weights_T), self._device)
            chosen_K = on(self._device, scored.positions_K)
        hidden_KH = hidden_TH.index_select(0, chosen_K)
        loss, log_probs_K = self._head_loss(hidden_KH, scored.scaled(scale), parameters)
        return loss, Scores(scored.positions_K, log_probs_K)

    def log_probs(self, batch: Batch, *, once: bool = False) -> Scores:
        """Return log p(target) where `batch.scored_T`, in float32 or wider."""
        # An accelerator's kernel for documents knows no branches.
        lay_out = begun_alike if once and self._device == "cpu" else end_to_end
        laid = lay_out(batch, self._device)
        hidden_KH = self._body_output(laid).index_select(0, laid.chosen_K)
        return Scores(laid.scored.positions_K, self._head_loss.log_probs(hidden_KH, laid.scored))

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return (K, H) before the head, at the scored positions."""
        laid = end_to_end(batch, self._device)
        return self._body_output(laid).index_select(0, laid.chosen_K)

    def _above(self) -> list[nn.Parameter]:
        """Return the trained parameters of the head, a tied one included, and of what else is
        outside the body."""
        heads = [child for child in self._model.children() if child is not self._body]
        found = [p for head in heads for p in head.parameters() if p.requires_grad]
        below = {id(p) for p in self._body.parameters()} if found else set()
        below -= {id(p) for p in self._model.get_output_embeddings().parameters()}
        return [p for p in found if id(p) not in below]

    def _body_output(self, laid: EndToEnd) -> torch.Tensor:
        """Return (T, H)."""
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
        hidden_TH: torch.Tensor = out.last_hidden_state.flatten(0, 1)
        return hidden_TH

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


def _weighed(
    nll_K: torch.Tensor, scored: Scored, weigh: Weigh, length: int, scale: float
) -> tuple[torch.Tensor, Scores]:
    """Return the loss with the weights that follow from nll, and the log-probabilities."""
    scores = Scores(scored.positions_K, -nll_K.detach())
    weights_T = weigh(scores.spread(length))
    weights_K = on(str(nll_K.device), weights_T[scored.positions_K])
    weighed_K = weights_K != 0
    return (nll_K[weighed_K] * weights_K[weighed_K]).sum() * scale, scores


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
