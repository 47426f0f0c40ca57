"""Texts to tokens with character offsets, by the tokenizer alone, in arrays.

Shape legend: T tokens of all texts, R texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    Ints32 = NDArray[np.int32]
    Ints64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of some texts, end to end.

    Args:
        ids_T: int32.
        begins_T, stops_T: int64 offsets of each token's characters in all texts, end to end. Where
            a tokenizer trims whitespace from its offsets, a token begins where the one before it
            ends.
        bounds_R1: int64; text r has the tokens [bounds[r], bounds[r + 1]).
    """

    ids_T: Ints32
    begins_T: Ints64
    stops_T: Ints64
    bounds_R1: Ints64


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Tokens:
    """Tokenise some texts together, without special tokens around them."""
    batch = tokenizer(
        list(texts),
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    ids = cast("list[list[int]]", batch["input_ids"])
    offsets = cast("list[list[tuple[int, int]]]", batch["offset_mapping"])
    bounds_R1 = bounds_of([len(one) for one in ids])
    pairs = chain.from_iterable(chain.from_iterable(offsets))
    offsets_T2 = np.fromiter(pairs, np.int64, 2 * int(bounds_R1[-1])).reshape(-1, 2)
    shift_T = np.repeat(bounds_of([len(text) for text in texts])[:-1], np.diff(bounds_R1))
    ids_T = np.fromiter(chain.from_iterable(ids), np.int32, len(shift_T))
    begins_T, stops_T = offsets_T2[:, 0] + shift_T, offsets_T2[:, 1] + shift_T
    # A token really begins where the one before it ends; some tokenizers trim whitespace.
    reached_T = np.maximum.accumulate(np.concatenate([[0], stops_T])[:-1])
    begins_T = np.minimum(begins_T, np.maximum(reached_T, shift_T))
    begins_T = np.maximum.accumulate(begins_T)  # in order already, but for a broken tokenizer
    return Tokens(ids_T, begins_T, stops_T, bounds_R1)


def bounds_of(lengths: Sequence[int]) -> Ints64:
    """Where each of some things laid end to end begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
