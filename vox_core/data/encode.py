"""A record as tokens and weights.

The whole text is tokenised once; a token is trained if it lies in one of the text's spans. A token
that straddles the beginning of a span has weight 0: the model is given its first characters.

Without a chat template the tokenizer's own special tokens go around the text, and an end of
sequence is added where it adds none; all of the text (or of the completion) and the end are
trained.

What is longer than `seq_len` is cut to whole turns: after the last end-of-turn token that fits, or,
if not even the first one does, at `seq_len` in the middle of a turn. A text is split into
consecutive pieces instead; each begins with the last token of the one before, as its context, so
that no token is lost and none trained twice.

Shape legend: T tokens of a document, P of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np

from vox_core.data.render import Rendered, Renderer, RenderError, Span
from vox_core.data.rows import Record
from vox_core.data.sampler import UNKNOWN, level
from vox_core.data.tokenizer import Tokens, tokenise

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    Ids: TypeAlias = NDArray[np.int32]
    Weights: TypeAlias = NDArray[np.float32]

Cut: TypeAlias = Literal["none", "whole turns", "mid-turn", "split"]
Reason: TypeAlias = Literal[
    "nothing to train", "nothing to train within seq_len", "preference pair"
]


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens that see one another, and which of them are trained.

    Args:
        tokens_T: int32 token ids.
        weights_T: float32; weight of token t as something that the model must produce. Always 0 at
            0, which nothing precedes.
        source, line: the row it comes from.
        ends: end-of-turn (or end-of-sequence) tokens that are trained.
        difficulty: what its row says (`sampler.py`); NaN for nothing.
        side, label: its place among the documents of its group, from 0, and what it is there.
    """

    tokens_T: Ids
    weights_T: Weights
    source: Path
    line: int
    ends: int
    difficulty: float = UNKNOWN
    side: int = 0
    label: str = ""

    def __len__(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """What became of a record: its documents (several only for a text that was split), or none and
    the reason.

    Args:
        rendered: the row as text; None for a preference pair.
        length: of the whole row, in tokens.
        fault: why the row cannot be rendered; empty if it can.
    """

    record: Record
    rendered: Rendered | None = None
    documents: tuple[Document, ...] = ()
    cut: Cut = "none"
    dropped: Reason | None = None
    length: int = 0
    fault: str = ""


class Encoder:
    """Encodes records for one tokenizer and one maximum length, in tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> None:
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self._prefix, self._suffix = _surroundings(tokenizer)
        self.renderer = Renderer(tokenizer)
        self.bos = cast("int | None", tokenizer.bos_token_id)

    def encode(self, record: Record) -> Encoded:
        """Encode one record.

        Raises:
            RenderError: the chat template refuses it.
        """
        (found,) = self.encode_many([record])
        if found.fault:
            raise RenderError(found.fault)
        return found

    def encode_many(self, records: Sequence[Record]) -> list[Encoded]:
        """Encode records together, which is much faster."""
        rows = [self._rendered(record) for record in records]
        texts = [row.rendered.text for row in rows if row.rendered]
        tokens = iter(tokenise(self.tokenizer, texts) if texts else ())
        return [
            self._fit(row.record, row.rendered, next(tokens)) if row.rendered else row
            for row in rows
        ]

    def _rendered(self, record: Record) -> Encoded:
        if record.kind == "preference":  # for objectives that compare two answers
            return Encoded(record, dropped="preference pair")
        try:
            return Encoded(record, self.renderer.render(record))
        except RenderError as fault:
            return Encoded(record, fault=str(fault))

    def _fit(self, record: Record, text: Rendered, tokens: Tokens) -> Encoded:
        """Cut to `seq_len`, and drop what then trains nothing."""
        tokens_T, weights_T, ends = self._whole(text, tokens)
        pieces, cut = self._pieces(record, len(tokens_T), ends)
        place, difficulty = (record.source, record.line), level(record.attributes.difficulty)
        documents = []
        for start, stop in pieces:
            weights_P = weights_T[start:stop].copy()
            weights_P[:1] = 0  # it has no predecessor in the piece
            if weights_P.any():
                trained = sum(start + 1 < end <= stop for end in ends)
                documents.append(
                    Document(tokens_T[start:stop], weights_P, *place, trained, difficulty)
                )
        dropped: Reason | None = None
        if not documents:
            trains = weights_T[1:].any()
            dropped = "nothing to train within seq_len" if trains else "nothing to train"
        return Encoded(record, text, tuple(documents), cut, dropped, len(tokens_T))

    def _whole(self, text: Rendered, tokens: Tokens) -> tuple[Ids, Weights, list[int]]:
        """All tokens of a row, their weights, and the positions just after each trained
        end-of-turn token."""
        is_end_T = np.isin(tokens.ids_T, list(self.renderer.end_of_turn))
        weights_T, ends = _mask(tokens, is_end_T, text.spans)
        if text.templated:
            return tokens.ids_T, weights_T, [end for end in ends if end > 1]
        before = self._prefix
        after = self._suffix if tokens.ids_T[-1:].tolist() != self._suffix[-1:] else []
        closing = text.spans[-1].weight if text.spans else 0
        weights_T = np.concatenate(
            [np.zeros(len(before)), weights_T, np.full(len(after), closing)], dtype=np.float32
        )
        tokens_T = np.array([*before, *tokens.ids_T.tolist(), *after], np.int32)
        closed = self._suffix and closing and len(tokens_T) > 1
        return tokens_T, weights_T, [len(tokens_T)] if closed else []

    def _pieces(
        self, record: Record, length: int, ends: Sequence[int]
    ) -> tuple[list[tuple[int, int]], Cut]:
        """Tokens [start, stop) of each document."""
        limit = self.seq_len
        if length <= limit:
            return [(0, length)], "none"
        if record.kind == "text":
            return [(a, min(a + limit, length)) for a in range(0, length - 1, limit - 1)], "split"
        if fitting := [end for end in ends if end <= limit]:
            return [(0, max(fitting))], "whole turns"
        return [(0, limit)], "mid-turn"


def _mask(
    tokens: Tokens, is_end_T: NDArray[np.bool_], spans: Sequence[Span]
) -> tuple[Weights, list[int]]:
    """The weight of its span for tokens inside one, and where end-of-turn tokens that close one
    end.

    An end-of-turn token may reach beyond its span: some swallow a newline. Any other token that
    does is not trained.
    """
    weights_T, ends = np.zeros(len(tokens.ids_T), np.float32), list[int]()
    for span in spans:
        low, high = np.searchsorted(tokens.begins_T, [span.start, span.stop]).tolist()
        within_T = is_end_T[low:high] | (tokens.stops_T[low:high] <= span.stop)
        weights_T[low:high][within_T] = span.weight
        if span.closed:
            ends += (np.flatnonzero(within_T & is_end_T[low:high])[-1:] + low + 1).tolist()
    return weights_T, ends


def _surroundings(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens to put before and after a text: what the tokenizer adds, and eos."""
    around = cast("list[int]", tokenizer("a")["input_ids"])
    inside = cast("list[int]", tokenizer("a", add_special_tokens=False)["input_ids"])
    starts = range(len(around) - len(inside) + 1)
    at = next(i for i in starts if around[i : i + len(inside)] == inside)
    before, after = around[:at], around[at + len(inside) :]
    eos = cast("int | None", tokenizer.eos_token_id)
    return before, after if eos is None or eos in after else [*after, eos]
