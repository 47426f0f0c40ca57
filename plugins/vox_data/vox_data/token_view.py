"""A row as its tokens: the text of each, its id, its weight, and what becomes of it.

The row goes through the encoder that training uses, once at its `seq_len` and once without a limit,
so that what is cut away can be shown too. Nothing here decides what is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from vox_core.api.rows import (
    Encoded,
    Encoder,
    Record,
    Tokens,
    row_findings,
    special_ids,
    stats_of,
    tokenise,
)

_WITHOUT_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True)
class TokenView:
    """A row's tokens with their texts, weights and findings.

    Args:
        form: name of the row's form.
        tokens: what each token stands for in the text; the rest of a character that several tokens
            make up is empty.
        ids, weights: of each token; the weight of one that is cut away is 0.
        special: positions of special tokens.
        kept: tokens up to which the row is not cut away.
        starts: positions where another document begins, of a text that is split.
        findings: ids of the audit's findings in this row.
        fault: why the row cannot be rendered; then there are no tokens.
    """

    file: Path
    line: int
    form: str
    tokens: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    special: tuple[int, ...] = ()
    kept: int = 0
    starts: tuple[int, ...] = ()
    cut: str = "none"
    dropped: str | None = None
    findings: tuple[str, ...] = ()
    fault: str | None = None

    @property
    def trained(self) -> int:
        """Tokens that are trained."""
        return sum(weight != 0 for weight in self.weights)

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


class TokenViewer:
    """Views rows with one transformers tokenizer and one sequence length."""

    def __init__(self, tokenizer: Any, seq_len: int) -> None:
        self._tokenizer, self._special = tokenizer, special_ids(tokenizer)
        self._encoder = Encoder(tokenizer, seq_len)
        self._unlimited = Encoder(tokenizer, _WITHOUT_LIMIT)

    def view(self, record: Record) -> TokenView:
        place = (record.source, record.line, record.form or record.kind)
        encoded, whole = (by.encode_many([record])[0] for by in (self._encoder, self._unlimited))
        if encoded.rendered is None:
            return TokenView(*place, dropped=encoded.dropped, fault=encoded.fault or None)
        texts, ids, weights = self._tokens(encoded.rendered.text, whole)
        kept = _kept(encoded, len(ids), self._encoder.seq_len)
        return TokenView(
            *place,
            tuple(texts),
            tuple(ids),
            tuple(weight if at < kept else 0.0 for at, weight in enumerate(weights)),
            tuple(at for at, id in enumerate(ids) if id in self._special),
            kept,
            _starts(encoded, len(ids), self._encoder.seq_len),
            encoded.cut,
            encoded.dropped,
            tuple(row_findings(stats_of(self._encoder, [[encoded]], {record.source: 0}))),
        )

    def _tokens(self, text: str, whole: Encoded) -> tuple[list[str], list[int], list[float]]:
        """Texts, ids and weights of a whole row."""
        (tokens,) = tokenise(self._tokenizer, [text])
        texts, inside = _texts(text, tokens), tokens.ids_T.tolist()
        if not whole.documents:
            return texts, inside, [0.0] * len(inside)
        document = whole.documents[0]
        ids = document.tokens_T.tolist()
        around = range(len(ids) - len(inside) + 1)
        before = next((n for n in around if ids[n : n + len(inside)] == inside), 0)
        names = cast("list[str]", self._tokenizer.convert_ids_to_tokens(ids))
        after = before + len(inside)
        texts = [*names[:before], *texts, *names[after:]]
        return texts, ids, np.asarray(document.weights_T, float).round(6).tolist()


def _texts(text: str, tokens: Tokens) -> list[str]:
    """The characters that each token adds to those before it."""
    reached = np.maximum.accumulate(np.concatenate([[0], tokens.stops_T]))
    return [text[a:b] for a, b in pairwise(reached.tolist())]


def _kept(encoded: Encoded, length: int, seq_len: int) -> int:
    if encoded.cut in ("none", "split"):
        return length
    return len(encoded.documents[0]) if encoded.documents else min(length, seq_len)


def _starts(encoded: Encoded, length: int, seq_len: int) -> tuple[int, ...]:
    """Of a text's pieces after the first; each has the token before it as its context."""
    return tuple(range(seq_len, length, seq_len - 1)) if encoded.cut == "split" else ()
