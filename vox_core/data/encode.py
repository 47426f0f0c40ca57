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

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np

from vox_core.data.records import Record
from vox_core.data.render import Rendered, Renderer, RenderError, Span

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    Ids: TypeAlias = NDArray[np.int32]
    Weights: TypeAlias = NDArray[np.float32]

Cut: TypeAlias = Literal["none", "whole turns", "mid-turn", "split"]
Reason: TypeAlias = Literal["nothing to train", "nothing to train within seq_len"]


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens that see one another, and which of them are trained.

    Args:
        tokens_T: int32 token ids.
        weights_T: float32; weight of token t as something that the model must produce. Always 0 at
            0, which nothing precedes.
        source, line: the row it comes from.
        ends: end-of-turn (or end-of-sequence) tokens that are trained.
    """

    tokens_T: Ids
    weights_T: Weights
    source: Path
    line: int
    ends: int

    def __len__(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """What became of a record: its documents (several only for a text that was split), or none and
    the reason."""

    documents: tuple[Document, ...]
    cut: Cut = "none"
    dropped: Reason | None = None


class Encoder:
    """Encodes records for one tokenizer and one maximum length, in tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._prefix, self._suffix = _surroundings(tokenizer)
        self.renderer = Renderer(tokenizer)

    def encode(self, record: Record) -> Encoded:
        """Encode one record.

        Raises:
            RenderError: the chat template refuses it.
        """
        return self._encode([(record, self.renderer.render(record))])[0]

    def encode_many(self, records: Sequence[Record]) -> tuple[list[Encoded], list[str]]:
        """Encode records together, which is much faster.

        Returns:
            What became of each, and the faults of those that cannot be rendered; if there are any,
            nothing is encoded.
        """
        rendered: list[tuple[Record, Rendered]] = []
        faults: list[str] = []
        for record in records:
            try:
                rendered.append((record, self.renderer.render(record)))
            except RenderError as fault:
                faults.append(f"{record.place}: {fault}")
        return ([], faults) if faults else (self._encode(rendered), [])

    def _encode(self, rendered: Sequence[tuple[Record, Rendered]]) -> list[Encoded]:
        if not rendered:
            return []
        batch = self._tokenizer(
            [text.text for _, text in rendered],
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        columns = zip(rendered, batch["input_ids"], batch["offset_mapping"], strict=True)
        return [
            self._fit(record, self._tokens(text, ids, offsets))
            for (record, text), ids, offsets in columns
        ]

    def _tokens(self, text: Rendered, ids: list[int], offsets: list[tuple[int, int]]) -> _Tokens:
        is_end_T = np.isin(np.array(ids, np.int32), list(self.renderer.end_of_turn))
        offsets_T2 = np.array(offsets, np.int64).reshape(-1, 2)
        weights_T, ends = _mask(offsets_T2, is_end_T, text.spans)
        if text.templated:
            return _Tokens.of(ids, weights_T, ends)
        before = self._prefix
        after = self._suffix if ids[-1:] != self._suffix[-1:] else []
        weights_T = np.concatenate(
            [np.zeros(len(before)), weights_T, np.ones(len(after))], dtype=np.float32
        )
        tokens = [*before, *ids, *after]
        return _Tokens.of(tokens, weights_T, [len(tokens)] if self._suffix else [])

    def _fit(self, record: Record, whole: _Tokens) -> Encoded:
        """Cut to `seq_len`, and drop what then trains nothing."""
        pieces, cut = self._pieces(record, whole)
        documents = tuple(
            Document(piece.tokens_T, piece.weights_T, record.source, record.line, len(piece.ends))
            for piece in pieces
            if piece.weights_T.any()
        )
        if documents:
            return Encoded(documents, cut)
        trains = whole.weights_T.any()
        return Encoded((), cut, "nothing to train within seq_len" if trains else "nothing to train")

    def _pieces(self, record: Record, whole: _Tokens) -> tuple[list[_Tokens], Cut]:
        length, limit = len(whole.tokens_T), self._seq_len
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
    def of(cls, tokens: Sequence[int], weights_T: Weights, ends: list[int]) -> _Tokens:
        weights_T[:1] = 0
        trained = [end for end in ends if weights_T[end - 1] > 0]
        return cls(np.array(tokens, np.int32), weights_T, trained)

    def slice(self, start: int, stop: int) -> _Tokens:
        """Tokens [start, stop); the first has no predecessor in it, so it is not trained."""
        ends = [end - start for end in self.ends if start + 1 < end <= stop]
        weights_T = self.weights_T[start:stop].copy()
        weights_T[:1] = 0
        return _Tokens(self.tokens_T[start:stop], weights_T, ends)


def _mask(
    offsets_T2: NDArray[np.int64], is_end_T: NDArray[np.bool_], spans: Sequence[Span]
) -> tuple[Weights, list[int]]:
    """Weight 1 for tokens inside a span, and where end-of-turn tokens that close one end.

    Some tokenizers trim whitespace from their offsets, so a token really begins where the one
    before it ends. An end-of-turn token may reach beyond its span: some swallow a newline.
    """
    begins_T, stops_T = offsets_T2.T
    reached_T = np.maximum.accumulate(np.concatenate([[0], stops_T[:-1]]))
    begins_T = np.minimum(begins_T, reached_T[: len(begins_T)])
    weights_T = np.zeros(len(begins_T), np.float32)
    ends: list[int] = []
    for span in spans:
        within_T = (begins_T >= span.start) & (begins_T < span.stop)
        within_T &= is_end_T | (stops_T <= span.stop)
        weights_T[within_T] = 1
        ends += (np.flatnonzero(within_T & is_end_T)[-1:] + 1).tolist() if span.closed else []
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
