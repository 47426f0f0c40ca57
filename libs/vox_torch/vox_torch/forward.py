"""From a batch to its loss: documents end to end where the model allows it, else in padded rows.

End to end is faster: no padding, and logits by chunks. Whether a model allows it is tried, and not
looked up, when the model is loaded: two short documents go both ways and must come out the same,
and a change of the first must not move the second. Else the model gets padded rows. So a family
that nobody has thought of trains correctly, and one that passes a state from token to token never
carries it from one document into the next.

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
from vox_torch.memory import is_out_of_memory

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

# How far hidden states of a document may move when the document before it changes: nothing but the
# place of other rows in the same products changes, which was seen to change no bit.
_INDEPENDENT = 1.0  # units of the dtype's roundoff

# How far the hidden states of the two ways may lie apart, relative: two orders of the same sums.
# Seen over the families of the tests and SmolLM2: 3 roundoffs times the square root of the layers.
_ROUNDOFFS, _MOST = 16.0, 5e-2


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
        with _watched(self._body, keep=1) as seen:
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


def _recurrent(base: PreTrainedModel) -> str | None:
    layers = getattr(base.config.get_text_config(), "layer_types", None) or ()
    for name in layers:
        if any(word in name for word in _MIXED_BY_STATE):
            return f"layers of kind {name}, which pass a state from token to token"
    return None


def _fault(padded: Padded, together: Together, base: PreTrainedModel, own: str) -> str | None:
    """Why end to end is not right for this model; None if it is.

    Raises:
        Exception: the device has not got the memory.
    """
    vocabulary = base.config.get_text_config().vocab_size
    try:
        with torch.no_grad():
            return _disagreement(padded, together, base, own, vocabulary)
    except (NotImplementedError, RuntimeError, TypeError, ValueError, LookupError) as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}"
    except AttributeError as error:
        return f"AttributeError: {error}"


def _disagreement(
    padded: Padded, together: Together, base: PreTrainedModel, own: str, vocabulary: int
) -> str | None:
    found_KH = together.hidden(_two_documents(vocabulary))
    after_another_KH = together.hidden(_two_documents(vocabulary, first=104729))
    if fault := _window_untold(base, together.windows):
        return fault
    roundoff = torch.finfo(base.dtype).eps
    moved = _distance(after_another_KH[_FIRST:], found_KH[_FIRST:])
    if moved > _INDEPENDENT * roundoff:
        return f"a document changes the next one by {moved:.1e}"
    base.set_attn_implementation(own)
    distance = _distance(found_KH, padded.hidden(_two_documents(vocabulary)))
    base.set_attn_implementation(DOCUMENTS)
    layers = base.config.get_text_config().num_hidden_layers
    if distance > min(_ROUNDOFFS * roundoff * math.sqrt(layers), _MOST):
        return f"hidden states {distance:.1e} from those of padded rows"
    return None


def _window_untold(base: PreTrainedModel, told: set[int | None]) -> str | None:
    """A window that a family keeps in its mask, and does not tell attention of.

    Two short documents would not show it: they are shorter than any window.
    """
    config = base.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    size = getattr(config, "sliding_window", None)
    if kinds is not None and "chunked_attention" in kinds:
        return "layers of kind chunked_attention"
    if kinds is not None and not any("sliding" in kind for kind in kinds):
        return None
    if isinstance(size, int) and getattr(config, "use_sliding_window", True) and size not in told:
        return f"a window of {size} tokens, which attention is not told of"
    return None


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


_FIRST, _SECOND = 11, 13


def _two_documents(vocabulary: int, first: int = 7919) -> Batch:
    """Of 11 and 13 tokens, which have nothing in common; the first depends on `first`."""
    one_T = np.arange(1, _FIRST + 1) * first
    other_T = np.arange(_FIRST + 1, _FIRST + _SECOND + 1) * 7919
    tokens_T = np.concatenate([one_T, other_T]) % vocabulary
    weights_T = np.ones(len(tokens_T), np.float32)
    return Batch(tokens_T, np.roll(tokens_T, -1), weights_T, np.array([0, _FIRST]))
