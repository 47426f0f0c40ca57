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

A prompt that the model is to answer itself is the text that a server would send, with the
generation prompt; none of it is trained, and it is never cut.

`stats_of` examines each row once, where its tokens are made, and the cache keeps the result: so a
second start has all of it without reading a row or loading a tokenizer. Counts are of all rows, and
the first few of each kind are named. `audit.py` decides what is worth reporting, and words it.

Train/serve skew is checked in some rows of every chunk: a server renders the messages so far with
the generation prompt, and the model goes on from there. Where that text is no prefix of the trained
one, the model is trained to go on from something that it will never see: most often because
the template opens a thought in the prompt which it leaves out of turns that are there already, or
because it moves the system prompt or the tools to the last user's turn.

Shape legend: T tokens of a document, P of a piece.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np

from vox_core.data.fields import UNKNOWN, level
from vox_core.data.render import Rendered, Renderer, RenderError, Span, common, weight_of
from vox_core.data.rows import Record
from vox_core.data.template import GENERATION
from vox_core.data.tokenizer import Tokens, tokenise

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    Ids: TypeAlias = NDArray[np.int32]
    Weights: TypeAlias = NDArray[np.float32]


Cut: TypeAlias = Literal["none", "whole turns", "mid-turn", "split"]
Reason: TypeAlias = Literal["nothing to train", "no room for an answer", "preference pair"]


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens that see one another, and which of them are trained.

    Args:
        tokens_T: int32 token ids.
        weights_T: float32; weight of token t as something that the model must produce. Always 0 at
            0, which nothing precedes.
        source, line: the row it comes from.
        ends: end-of-turn (or end-of-sequence) tokens that are trained.
        difficulty: what its row says (`fields.level`); NaN for nothing.
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
    """An encoded record: its documents (several only for a text that was split), or none and
    the reason.

    Args:
        rendered: the row as text; None for a preference pair.
        length: of the whole row, in tokens.
        joined: the first token of an answer begins in the prompt.
        fault: why the row cannot be rendered; empty if it can.
    """

    record: Record
    rendered: Rendered | None = None
    documents: tuple[Document, ...] = ()
    cut: Cut = "none"
    dropped: Reason | None = None
    length: int = 0
    joined: bool = False
    fault: str = ""


class Encoder:
    """Encodes records for one tokenizer and one maximum length, in tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> None:
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self._prefix, self._suffix = _surroundings(tokenizer)
        self.renderer = Renderer(tokenizer)
        self.bos = cast("int | None", tokenizer.bos_token_id)

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
        made = []
        for start, stop in pieces:
            weights_P = weights_T[start:stop].copy()
            weights_P[:1] = 0  # it has no predecessor in the piece
            if weights_P.any() or not record.answered:
                trained = sum(start + 1 < end <= stop for end in ends)
                made.append(Document(tokens_T[start:stop], weights_P, *place, trained, difficulty))
        dropped: Reason | None = None
        if not made:
            trains = weights_T[1:].any() or not record.answered
            dropped = "no room for an answer" if trains else "nothing to train"
        starts = [span.start for span in text.spans if span.weight]
        before = zip(starts, np.searchsorted(tokens.begins_T, starts).tolist(), strict=True)
        joined = any(n and text.text[at : tokens.stops_T[n - 1]].strip() for at, n in before)
        return Encoded(record, text, tuple(made), cut, dropped, len(tokens_T), joined)

    def _whole(self, text: Rendered, tokens: Tokens) -> tuple[Ids, Weights, list[int]]:
        """All tokens of a row, their weights, and the positions just after each trained
        end-of-turn token."""
        is_end_T = np.isin(tokens.ids_T, list(self.renderer.end_of_turn))
        weights_T, ends = _mask(tokens, is_end_T, text.spans)
        if text.templated:
            return tokens.ids_T, weights_T, [end for end in ends if end > 1]
        complete = not text.spans or tokens.ids_T[-1:].tolist() == self._suffix[-1:]
        after = [] if complete else self._suffix
        closing = text.spans[-1].weight if text.spans else 0
        weights_T = np.concatenate(
            [np.zeros(len(self._prefix)), weights_T, np.full(len(after), closing)], dtype=np.float32
        )
        tokens_T = np.array([*self._prefix, *tokens.ids_T.tolist(), *after], np.int32)
        closed = self._suffix and closing and len(tokens_T) > 1
        return tokens_T, weights_T, [len(tokens_T)] if closed else []

    def _pieces(
        self, record: Record, length: int, ends: Sequence[int]
    ) -> tuple[list[tuple[int, int]], Cut]:
        """Tokens [start, stop) of each document."""
        limit = self.seq_len
        if not record.answered:  # there is to be room for an answer
            return [(0, length)][: length < limit], "none"
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


NAMED = 5
"""Rows that are named of each kind."""
SERVED_OF_A_CHUNK = 8
"""Rows of some hundred that are rendered as a server would, too."""
_SHOWN = 40
_WORD = re.compile(r"[<\[]?[^\s<\[]*$")
"""The last word or special token of a text, begun or empty."""
_DROPPED = {"nothing to train": "nothing-trained", "no room for an answer": "prompt-too-long"}


@dataclass
class EncodeStats:
    """Counts and findings over encoded rows.

    Args:
        answers: rows that are not of the form text.
        prompts: those that the model answers itself.
        dropped: reason -> rows that gave no document.
        truncated: "whole turns", "mid-turn" or "split" -> rows longer than `seq_len` that were
            treated so (see encode.py); those dropped after it are among `dropped` only.
        faults: file, line and fault of the rows that cannot be rendered.
        misfits: the same of the rows that the objective cannot use.
        counts: id of a finding -> rows.
        places: id of a finding -> the first of its rows: number of the file and line.
        details: id of a finding -> more words about its first row.
        lengths: tokens of a whole row, or of a side, before it is cut -> how many there are.
        ended: rows with an end-of-turn token that is trained, on every side; prompts, if answers to
            them can end.
        served: rows, or sides, that were rendered as a server would.
        largest: the largest token id; -1 without tokens.
        template, markers: there is a chat template; it has generation markers.
    """

    rows: int = 0
    answers: int = 0
    prompts: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[Path, int, str]] = field(default_factory=list)
    misfits: list[tuple[Path, int, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[list[int]]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    ended: int = 0
    served: int = 0
    largest: int = -1
    template: bool = False
    markers: bool = False

    def note(self, name: str, place: tuple[int, int], detail: str = "") -> None:
        self.counts[name] += 1
        places = self.places.setdefault(name, [])
        if len(places) < NAMED:
            places.append([*place])
        if detail:
            self.details.setdefault(name, detail)

    @property
    def findings(self) -> dict[str, int]:
        """Return `counts`; where all rows are prompts alone, they lack no answer."""
        alone = self.counts["no-answer"] == self.prompts
        return {name: n for name, n in self.counts.items() if not (alone and name == "no-answer")}

    def add(self, later: EncodeStats) -> None:
        """Add the counts of rows that come after these."""
        for name in ("rows", "answers", "prompts", "ended", "served", "faults", "misfits"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for name in ("dropped", "truncated", "counts", "lengths"):
            getattr(self, name).update(getattr(later, name))
        for name, found in later.places.items():
            places = self.places.setdefault(name, [])
            places += found[: NAMED - len(places)]
        self.details = {**later.details, **self.details}
        self.largest = max(self.largest, later.largest)
        self.template |= later.template
        self.markers |= later.markers


def stats_of(
    encoder: Encoder, rows: Sequence[Sequence[Encoded]], numbers: Mapping[Path, int]
) -> EncodeStats:
    """Statistics of some hundred rows.

    Args:
        rows: the sides of each row; one unless an objective compares.
        numbers: of the files that they are from.
    """
    template = encoder.renderer.template
    every = [side for sides in rows for side in sides]
    stats = EncodeStats(
        rows=len(rows),
        faults=[(each.record.source, each.record.line, each.fault) for each in every if each.fault],
        answers=sum(any(side.record.kind != "text" for side in sides) for sides in rows),
        prompts=sum(len(side.documents) for side in every if not side.record.answered),
        template=template is not None,
        markers=bool(GENERATION.search(template or "")),
    )
    for sides in rows:
        _count(stats, encoder, sides, numbers)
    rendered = [side for side in every if side.rendered and side.record.answered]
    for at in _sample(len(rendered)):
        record = rendered[at].record
        if template is not None and record.messages is not None:
            stats.served += 1
            if difference := serving_difference(encoder.renderer, record):
                stats.note("serving-differs", (numbers[record.source], record.line), difference)
    return stats


def _count(
    stats: EncodeStats, encoder: Encoder, sides: Sequence[Encoded], numbers: Mapping[Path, int]
) -> None:
    """Count a row once; `lengths` has one entry per side."""
    stats.dropped.update({side.dropped for side in sides if side.dropped})
    stats.truncated.update({s.cut for s in sides if s.cut != "none" and not s.dropped})
    rendered = [(side, side.rendered) for side in sides if side.rendered]
    stats.lengths.update(side.length for side, _ in rendered)
    stops = encoder.renderer.end_of_turn
    ends = [any(d.ends for d in s.documents) if s.record.answered else stops for s, _ in rendered]
    stats.ended += bool(ends) and all(ends)
    tops = [int(document.tokens_T.max()) for side in sides for document in side.documents]
    stats.largest = max(stats.largest, *tops, -1)
    for name in dict.fromkeys(name for each in rendered for name in _findings(encoder, *each)):
        record = sides[0].record
        stats.note(name, (numbers[record.source], record.line))


def _findings(encoder: Encoder, row: Encoded, rendered: Rendered) -> Iterator[str]:
    """Ids of the findings about one row; see `audit.FINDINGS`."""
    renderer, text = encoder.renderer, row.record.text
    closers = renderer.end_of_turn_names() if renderer.template is not None else []
    if text is not None and any(name in text for name in closers):
        yield "rendered-text"
    yield from _trained_words(renderer, row.record, rendered)
    if row.joined:
        yield "joined-answer"
    if row.dropped:
        yield _DROPPED[row.dropped]
    elif row.record.form == "prompt":
        yield "no-answer"
    elif row.cut == "mid-turn":
        yield "cut-in-answer"
    elif row.record.answered and not any(document.ends for document in row.documents):
        yield "no-end"
    for document in row.documents:
        if encoder.bos is not None and document.tokens_T[:2].tolist() == [encoder.bos] * 2:
            yield "double-bos"


def _trained_words(renderer: Renderer, record: Record, rendered: Rendered) -> set[str]:
    """Findings about words that are not the assistant's, and trained all the same."""
    found = set()
    for index, message in enumerate(record.messages or ()):
        if message.role == "assistant" or message.weight is not None:
            continue  # said by the row itself
        words = message.content.strip()
        at = rendered.text.find(words) if words else -1
        if at < 0 or not _trained(rendered, at):
            continue
        # The same words may stand in what the assistant says.
        before = renderer.turns(record).before_content(index)
        if before is not None and _trained(rendered, len(before)):
            system = message.role in ("system", "developer")
            found.add("system-trained" if system else "prompt-trained")
    return found


def _sample(rows: int) -> list[int]:
    """Some of so many rows: one of each of equal stretches, at another place in each, since rows
    may alternate."""
    wanted = min(rows, SERVED_OF_A_CHUNK)
    bounds = [rows * n // wanted for n in range(wanted + 1)] if wanted else []
    return [a + 5 * n % (b - a) for n, (a, b) in enumerate(pairwise(bounds))]


def _trained(rendered: Rendered, at: int) -> bool:
    return any(span.start <= at < span.stop for span in rendered.spans)


def serving_difference(renderer: Renderer, record: Record) -> str | None:
    """Compare the rendered row with a server's prompt at each trained assistant turn.

    Returns the first difference in words, or None.

    Raises:
        RenderError: the record cannot be rendered.
    """
    if record.messages is None or renderer.template is None or record.kind == "preference":
        return None
    text = renderer.render(record).text
    found = [
        difference
        for turn, message in enumerate(record.messages)
        if message.role == "assistant" and weight_of(message)
        if (difference := _difference(renderer.turns(record).prompt(turn), text, turn))
    ]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + more if found else None


def _difference(prompt: str | None, text: str, turn: int) -> str | None:
    if turn == 0:
        return None  # nobody asked
    if prompt is None:
        return f"a server could not ask for messages[{turn}]: the template refuses those before it"
    if text.startswith(prompt):
        return None
    at = _WORD.search(text[: common(prompt, text)]).start()  # type: ignore[union-attr]
    sent, trained = (repr(one[at : at + _SHOWN]) for one in (prompt, text))
    return f"before messages[{turn}] a server sends {sent} where the model is trained on {trained}"
