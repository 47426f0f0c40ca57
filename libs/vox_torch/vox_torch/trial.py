"""Whether a model's documents may lie end to end: it is tried, and not looked up.

When a model is loaded, two short documents go both ways and must come out the same, and a change of
the first must not move the second. Else the model gets padded rows. So a family that nobody has
thought of trains correctly, and one that passes a state from token to token never carries it from
one document into the next.

This module imports torch, and is imported when there is a model to compute with.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from vox_core.contract import Batch
from vox_torch.attention import DOCUMENTS, register
from vox_torch.forward import Loss, Padded, Together
from vox_torch.memory import is_out_of_memory

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_MIXED_BY_STATE = ("linear", "recurrent", "mamba", "conv", "rwkv")
"""What the names of layers say that pass a state from token to token (`config.layer_types`)."""

_NOT_UNDERSTOOD = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a model raises that does not expect documents end to end."""

# How far hidden states of a document may move when the document before it changes: nothing but the
# place of other rows in the same products changes, which was seen to change no bit.
_INDEPENDENT = 1.0  # units of the dtype's roundoff

# How far the hidden states of the two ways may lie apart, relative: two orders of the same sums.
# Seen over the families of the tests and SmolLM2: 1.6 roundoffs times the root of the layers.
_ROUNDOFFS, _MOST = 16.0, 5e-2


def loss_of(model: PeftModel, device: str, *, rows: bool = False) -> tuple[Loss, str | None]:
    """The best way that is right for `model`, and why it is not end to end where it is not.

    Args:
        rows: padded rows are wanted, and nothing is tried.
    """
    padded = Padded(model, device)
    if rows:
        return padded, None
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
    except _NOT_UNDERSTOOD as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}"


def _disagreement(
    padded: Padded, together: Together, base: PreTrainedModel, own: str, vocabulary: int
) -> str | None:
    found_KH = together.hidden(_two_documents(vocabulary))
    together.logits(found_KH[None, :1])  # raises where the head asks the body for more
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
