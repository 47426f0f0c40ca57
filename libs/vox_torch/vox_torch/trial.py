"""Test whether a model computes concatenated documents correctly; else it gets padded rows.

When a model is loaded, two short documents go through both layouts and must give the same result,
and a change of the first must not affect the second. So unknown families train correctly, and a
recurrent state is never carried from one document to the next.

This module imports torch; import it lazily.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from vox_core.contract import Batch
from vox_torch.attention import DOCUMENTS, register
from vox_torch.experts import row_by_row
from vox_torch.forward import Loss, Padded, Together
from vox_torch.memory import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MIXED_BY_STATE = ("linear", "recurrent", "mamba", "conv", "rwkv")
"""What the names of layers say that pass a state from token to token (`config.layer_types`)."""

NOT_UNDERSTOOD = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a model raises that does not expect documents end to end."""

# Tolerance of a document's hidden states when the document before it changes. Only the position of
# other rows in the same products changes; no bit was observed to change. (In a mixture of experts
# their number changes as well, for each expert, so here each row has products of its own.)
_INDEPENDENT = 1.0  # units of the dtype's roundoff

# Relative tolerance between the hidden states of both layouts, which differ in the order of sums.
# Observed for the families of the tests and SmolLM2: 1.6 roundoffs times the root of the layers.
_ROUNDOFFS, _MOST = 16.0, 5e-2


def loss_of(model: PreTrainedModel, device: str, *, rows: bool = False) -> tuple[Loss, str | None]:
    """Return the fastest correct layout for `model`, and why it is not concatenation if it is not.

    Args:
        rows: use padded rows without a test.
    """
    padded = Padded(model, device)
    if rows:
        return padded, None
    base = model.eval()
    own = base.config._attn_implementation
    fault = recurrent(base)
    if fault is None:
        register()
        base.set_attn_implementation(DOCUMENTS)
        together = Together(model, device)
        fault = _fault(padded, together, base, own)
    if fault is None:
        return together, None
    base.set_attn_implementation(own)
    return padded, fault


def recurrent(base: PreTrainedModel) -> str | None:
    """Return a kind of layer that passes a state from token to token, as a reason."""
    layers = getattr(base.config.get_text_config(), "layer_types", None) or ()
    for name in layers:
        if any(word in name for word in _MIXED_BY_STATE):
            return f"layers of kind {name}, which pass a state from token to token"
    return None


def _fault(padded: Padded, together: Together, base: PreTrainedModel, own: str) -> str | None:
    """Return why concatenation is incorrect for this model; None if it is correct.

    Raises:
        Exception: the device has not got the memory.
    """
    vocabulary = base.config.get_text_config().vocab_size
    try:
        with torch.no_grad(), row_by_row(base):
            return _disagreement(padded, together, base, own, vocabulary)
    except NOT_UNDERSTOOD as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}"


def _disagreement(
    padded: Padded, together: Together, base: PreTrainedModel, own: str, vocabulary: int
) -> str | None:
    found_KH = together.hidden(_two_documents(vocabulary))
    together.logits(found_KH[None, :1])  # raises if the head needs more of the body
    after_another_KH = together.hidden(_two_documents(vocabulary, first=104729))
    if fault := window_untold(base, together.windows):
        return fault
    roundoff = torch.finfo(base.dtype).eps
    moved = relative_distance(after_another_KH[_FIRST:], found_KH[_FIRST:])
    if moved > _INDEPENDENT * roundoff:
        return f"a document changes the next one by {moved:.1e}"
    base.set_attn_implementation(own)
    padded_KH = padded.hidden(_two_documents(vocabulary))
    base.set_attn_implementation(DOCUMENTS)
    parts = zip(*(each.split((_FIRST, _SECOND)) for each in (found_KH, padded_KH)), strict=True)
    distance = max(_typical_distance(*of_a_document) for of_a_document in parts)
    if distance > tolerance(base):
        return f"hidden states {distance:.1e} from those of padded rows"
    return None


def tolerance(base: PreTrainedModel) -> float:
    """Return the largest relative distance that the order of sums explains."""
    layers = base.config.get_text_config().num_hidden_layers
    return min(_ROUNDOFFS * torch.finfo(base.dtype).eps * math.sqrt(layers), _MOST)


def window_untold(base: PreTrainedModel, told: set[int | None]) -> str | None:
    """Return a window that a family applies in its mask but does not pass to attention.

    The test's two documents are shorter than any window and would not show it.
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


def relative_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |found - expected| / |expected|, in float64."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


def _typical_distance(found_KH: torch.Tensor, expected_KH: torch.Tensor) -> float:
    """Return the median over the positions of |found - expected| / |expected|: rounding may send
    single tokens of a mixture to other experts."""
    wide_KH = expected_KH.double()
    return float(((found_KH.double() - wide_KH).norm(dim=1) / wide_KH.norm(dim=1)).median())


_FIRST, _SECOND = 11, 13


def _two_documents(vocabulary: int, first: int = 7919) -> Batch:
    """Make two documents of 11 and 13 tokens, all different; the first depends on `first`."""
    one_T = np.arange(1, _FIRST + 1) * first
    other_T = np.arange(_FIRST + 1, _FIRST + _SECOND + 1) * 7919
    tokens_T = np.concatenate([one_T, other_T]) % vocabulary
    weights_T = np.ones(len(tokens_T), np.float32)
    return Batch(tokens_T, np.roll(tokens_T, -1), weights_T, np.array([0, _FIRST]))
