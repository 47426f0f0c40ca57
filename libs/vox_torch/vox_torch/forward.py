"""From a batch to its loss: documents end to end where the model allows it, else in padded rows.

End to end is faster: no padding, and logits by chunks. Whether a model allows it is tried, and not
looked up: two short documents go both ways when the model is loaded, and where the outcomes are not
the same the model gets padded rows. So a family that nobody has thought of trains correctly, and
one that passes a state from token to token never carries it from one document into the next.

This module imports torch, and is imported when there is a model to compute with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from vox_core.contract import Batch
from vox_torch.attention import DOCUMENTS, register
from vox_torch.layout import EndToEnd, end_to_end, rows
from vox_torch.loss import HeadLoss, weighted_nll

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel


class Loss(Protocol):
    """From a batch to its loss."""

    def __call__(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        """`scale * sum(weight * nll)`, a scalar in float32 or wider.

        Args:
            scale: of the gradients, from the first on: float16 ends at 65504.
        """
        ...


_MIXED_BY_STATE = ("linear", "recurrent", "mamba", "conv", "rwkv")
"""What the names of layers say that pass a state from token to token (`config.layer_types`)."""

# How far the hidden states of the two ways may lie apart, relative, in units of the dtype's
# roundoff and of the square root of the number of layers. Seen over the families of the tests: at
# most 3, in bfloat16 and in float32; a document that sees another one is above 1e-2.
_ROUNDOFFS = 16


def loss_of(model: PeftModel, device: str) -> tuple[Loss, str | None]:
    """The best way that is right for `model`, and why it is not end to end where it is not."""
    padded = Padded(model, device)
    base = model.eval().get_base_model()
    own = base.config._attn_implementation
    fault = _recurrent(base)
    if fault is None:
        register()
        base.set_attn_implementation(DOCUMENTS)
        together = Together(model, device)
        fault = _fault(padded, together, base, own)
    if fault is None:
        return together, None
    base.set_attn_implementation(own)
    return padded, fault


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
        return seen[0][laid.chosen_NL]


class Together:
    """Documents end to end; logits a chunk at a time."""

    def __init__(self, model: PeftModel, device: str) -> None:
        self._model, self._device = model.get_base_model(), device
        self._body = self._model.base_model
        below = {id(p) for p in self._body.parameters()}
        above = [p for p in self._model.parameters() if p.requires_grad and id(p) not in below]
        vocabulary = self._model.config.get_text_config().vocab_size
        self._head_loss = HeadLoss(self._logits, above, vocabulary)

    def __call__(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        laid = end_to_end(batch, self._device)
        return self._head_loss(self._hidden(laid), laid.trained.scaled(scale))

    def hidden(self, batch: Batch) -> torch.Tensor:
        """(K, H) before the head, where the batch is trained."""
        return self._hidden(end_to_end(batch, self._device))

    def _hidden(self, laid: EndToEnd) -> torch.Tensor:
        with _watched(self._body, keep=1) as seen:
            self._model(
                input_ids=laid.tokens_1T,
                position_ids=laid.positions_1T,
                documents=laid.extents,
                use_cache=False,
            )
        (hidden_1TH,) = seen
        return hidden_1TH[0].index_select(0, laid.chosen_K)

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


class _Only(dict[str, Any]):
    """The output of a body that gave hidden states and nothing else, whatever its class is."""

    def __init__(self, hidden_1CH: torch.Tensor) -> None:
        super().__init__(last_hidden_state=hidden_1CH)
        self.last_hidden_state = hidden_1CH

    def __getattr__(self, name: str) -> None:
        """Caches, attentions and whatever else there was none of."""

    def __getitem__(self, key: int | str) -> Any:
        return self.last_hidden_state if key in (0, "last_hidden_state") else None


def _recurrent(base: PreTrainedModel) -> str | None:
    layers = getattr(base.config.get_text_config(), "layer_types", None) or ()
    for name in layers:
        if any(word in name for word in _MIXED_BY_STATE):
            return f"layers of kind {name}, which pass a state from token to token"
    return None


def _fault(padded: Padded, together: Together, base: PreTrainedModel, own: str) -> str | None:
    """Why the two ways do not agree on two short documents; None if they do."""
    batch = _two_documents(base.config.get_text_config().vocab_size)
    with torch.no_grad():
        try:
            found_KH = together.hidden(batch).double()
        except (NotImplementedError, RuntimeError, TypeError, AttributeError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        base.set_attn_implementation(own)
        expected_KH = padded.hidden(batch).double()
        base.set_attn_implementation(DOCUMENTS)
    distance = float((found_KH - expected_KH).norm() / expected_KH.norm())
    layers = base.config.get_text_config().num_hidden_layers
    allowed = _ROUNDOFFS * torch.finfo(base.dtype).eps * math.sqrt(layers)
    return None if distance <= allowed else f"hidden states {distance:.1e} apart"


def _two_documents(vocabulary: int) -> Batch:
    """Of 11 and 13 tokens, which have nothing in common."""
    tokens_T = np.arange(1, 25) * 7919 % vocabulary
    targets_T = np.roll(tokens_T, -1)
    return Batch(tokens_T, targets_T, np.ones(24, np.float32), np.array([0, 11]))
