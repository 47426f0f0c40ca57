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

Shape legend: T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np

from vox_core.data.render import Rendered, Renderer, RenderError
from vox_core.data.rows import Record
from vox_core.data.sampler import UNKNOWN, level
from vox_core.data.tokenizer import Tokens, tokenise

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    Ids: TypeAlias = NDArray[np.int32]
    Weights: TypeAlias = NDArray[np.float32]

_Ends: TypeAlias = list[list[int]]
Cut: TypeAlias = Literal["none", "whole turns", "mid-turn", "split"]
Reason: TypeAlias = Literal[
    "nothing to train", "nothing to train within seq_len", "preference pair"
]
Look: TypeAlias = Callable[[Record, Rendered], None]


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
    """

    tokens_T: Ids
    weights_T: Weights
    source: Path
    line: int
    ends: int
    difficulty: float = UNKNOWN

    def __len__(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """What became of a record: its documents (several only for a text that was split), or none and
    the reason; `length` is that of the whole row, in tokens."""

    documents: tuple[Document, ...]
    cut: Cut = "none"
    dropped: Reason | None = None
    length: int = 0


_PREFERENCE = Encoded((), dropped="preference pair")
"""Kept for objectives that take one answer over another; this one has no use for it."""


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
        if record.kind == "preference":
            return _PREFERENCE
        return self._encode([(record, self.renderer.render(record))])[0]

    def encode_many(
        self, records: Sequence[Record], look: Look | None = None
    ) -> tuple[list[Encoded], list[str]]:
        """Encode records together, which is much faster.

        Args:
            look: told of each row as text.

        Returns:
            What became of each, and the faults of those that cannot be rendered; if there are any,
            nothing is encoded.
        """
        rendered: list[tuple[Record, Rendered]] = []
        faults: list[str] = []
        for record in records:
            if record.kind == "preference":
                continue
            try:
                rendered.append((record, self.renderer.render(record)))
            except RenderError as fault:
                faults.append(f"{record.place}: {fault}")
        if faults:
            return [], faults
        if look:
            for record, text in rendered:
                look(record, text)
        encoded = iter(self._encode(rendered))
        return [_PREFERENCE if r.kind == "preference" else next(encoded) for r in records], []

    def _encode(self, rendered: Sequence[tuple[Record, Rendered]]) -> list[Encoded]:
        if not rendered:
            return []
        tokens = tokenise(self.tokenizer, [text.text for _, text in rendered])
        is_end_T = np.isin(tokens.ids_T, list(self.renderer.end_of_turn))
        spans = _Spans.of([text for _, text in rendered])
        weights_T, ends = _mask(tokens, is_end_T, spans)
        bounds = pairwise(tokens.bounds_R1.tolist())
        rows = zip(rendered, bounds, ends, strict=True)
        return [
            self._fit(record, self._whole(text, tokens.ids_T[a:b], weights_T[a:b], found, a))
            for (record, text), (a, b), found in rows
        ]

    def _whole(
        self, text: Rendered, ids_T: Ids, weights_T: Weights, ends: list[int], first: int
    ) -> _Tokens:
        """A row's tokens; `ends` are counted from `first` tokens before it."""
        if text.templated:
            return _Tokens.of(ids_T, weights_T, [end - first for end in ends])
        before = self._prefix
        after = self._suffix if ids_T[-1:].tolist() != self._suffix[-1:] else []
        closing = text.spans[-1].weight if text.spans else 0
        weights_T = np.concatenate(
            [np.zeros(len(before)), weights_T, np.full(len(after), closing)], dtype=np.float32
        )
        tokens_T = np.array([*before, *ids_T.tolist(), *after], np.int32)
        return _Tokens.of(tokens_T, weights_T, [len(tokens_T)] if self._suffix and closing else [])

    def _fit(self, record: Record, whole: _Tokens) -> Encoded:
        """Cut to `seq_len`, and drop what then trains nothing."""
        pieces, cut = self._pieces(record, whole)
        place, difficulty = (record.source, record.line), level(record.attributes.difficulty)
        documents = tuple(
            Document(piece.tokens_T, piece.weights_T, *place, len(piece.ends), difficulty)
            for piece in pieces
            if piece.weights_T.any()
        )
        if documents:
            return Encoded(documents, cut, None, len(whole.tokens_T))
        reason: Reason = (
            "nothing to train within seq_len" if whole.weights_T.any() else "nothing to train"
        )
        return Encoded((), cut, reason, len(whole.tokens_T))

    def _pieces(self, record: Record, whole: _Tokens) -> tuple[list[_Tokens], Cut]:
        length, limit = len(whole.tokens_T), self.seq_len
        if length <= limit:
            return [whole], "none"
        if record.kind == "text":
            return [whole.slice(a, a + limit) for a in range(0, length - 1, limit - 1)], "split"
        if fitting := [end for end in whole.ends if end <= limit]:
            return [whole.slice(0, max(fitting))], "whole turns"
        return [whole.slice(0, limit)], "mid-turn"


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """Tokens, weights, and the positions just after each trained end-of-turn token."""

    tokens_T: Ids
    weights_T: Weights
    ends: list[int]

    @classmethod
    def of(cls, tokens_T: Ids, weights_T: Weights, ends: list[int]) -> _Tokens:
        weights_T[:1] = 0
        return cls(tokens_T, weights_T, [end for end in ends if end > 1])

    def slice(self, start: int, stop: int) -> _Tokens:
        """Tokens [start, stop); the first has no predecessor in it, so it is not trained."""
        ends = [end - start for end in self.ends if start + 1 < end <= stop]
        weights_T = self.weights_T[start:stop].copy()
        weights_T[:1] = 0
        return _Tokens(self.tokens_T[start:stop], weights_T, ends)


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """The spans of some texts laid end to end: offsets in all of them, `row` the text's number."""

    row: list[int]
    start_S: NDArray[np.int64]
    stop_S: NDArray[np.int64]
    closed: list[bool]
    weight: list[float]

    @classmethod
    def of(cls, texts: Sequence[Rendered]) -> _Spans:
        found, at = [], 0
        for row, text in enumerate(texts):
            found += [(row, at + s.start, at + s.stop, s.closed, s.weight) for s in text.spans]
            at += len(text.text)
        row_S, start_S, stop_S, closed_S, weight_S = zip(*found, strict=True) if found else [()] * 5
        return cls(
            list(row_S),
            np.array(start_S, np.int64),
            np.array(stop_S, np.int64),
            list(closed_S),
            list(weight_S),
        )


def _mask(tokens: Tokens, is_end_T: NDArray[np.bool_], spans: _Spans) -> tuple[Weights, _Ends]:
    """The weight of its span for tokens inside one, and, for each text, where end-of-turn tokens
    that close one end.

    An end-of-turn token may reach beyond its span: some swallow a newline. Any other token that
    does is not trained.
    """
    weights_T = np.zeros(len(tokens.ids_T), np.float32)
    ends: _Ends = [[] for _ in tokens.bounds_R1[1:]]
    extents = _extents(tokens, spans)
    columns = zip(spans.row, extents, spans.stop_S, spans.closed, spans.weight, strict=True)
    for row, (low, high), stop, closed, weight in columns:
        within_T = is_end_T[low:high] | (tokens.stops_T[low:high] <= stop)
        weights_T[low:high][within_T] = weight
        if closed:
            ends[row] += (np.flatnonzero(within_T & is_end_T[low:high])[-1:] + low + 1).tolist()
    return weights_T, ends


def _extents(tokens: Tokens, spans: _Spans) -> Iterator[tuple[int, int]]:
    """The tokens of its own text that begin in each span."""
    rows_S = np.array(spans.row, np.int64)
    low_S = np.searchsorted(tokens.begins_T, spans.start_S)
    high_S = np.searchsorted(tokens.begins_T, spans.stop_S)
    low_S = np.maximum(low_S, tokens.bounds_R1[rows_S])
    high_S = np.minimum(high_S, tokens.bounds_R1[rows_S + 1])
    return zip(low_S.tolist(), high_S.tolist(), strict=True)


def _surroundings(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens to put before and after a text: what the tokenizer adds, and eos."""
    around = cast("list[int]", tokenizer("a")["input_ids"])
    inside = cast("list[int]", tokenizer("a", add_special_tokens=False)["input_ids"])
    starts = range(len(around) - len(inside) + 1)
    at = next(i for i in starts if around[i : i + len(inside)] == inside)
    before, after = around[:at], around[at + len(inside) :]
    eos = cast("int | None", tokenizer.eos_token_id)
    return before, after if eos is None or eos in after else [*after, eos]
