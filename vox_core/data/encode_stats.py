"""Statistics of rows while they are tokenised, kept in the cache with their tokens.

Each block of rows is examined once, where its tokens are made (`tokenize_job.py`), so a second
start has all of it without reading a row or loading a tokenizer. Counts are of all rows, and the
first few of each kind are named. What is worth reporting, and in which words, is `audit.py`'s.

Train/serve skew is checked in some rows of every chunk: a server renders the messages so far with
the generation prompt, and the model goes on from there. Where that text is no prefix of the trained
one, the model is trained to go on from something that it will never see: most often because
the template opens a thought in the prompt which it leaves out of turns that are there already, or
because it moves the system prompt or the tools to the last user's turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core.data.encode import Encoded, Encoder
from vox_core.data.render import Rendered, Renderer, RenderError, weight_of
from vox_core.data.rows import Record
from vox_core.data.turns import common

if TYPE_CHECKING:
    from vox_core.data.documents import Columns

NAMED = 5
"""Rows that are named of each kind."""
SERVED_OF_A_CHUNK = 8
"""Rows of some hundred that are rendered as a server would, too."""
MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN = 40
_WORD = re.compile(r"[<\[]?[^\s<\[]*$")
"""The last word or special token of a text, begun or empty."""
_DROPPED = {
    "nothing to train": "nothing-trained",
    "nothing to train within seq_len": "cut-before-answer",
}


@dataclass(slots=True)
class EncodeStats:
    """Counts of some rows.

    Args:
        counts: id of a finding -> rows.
        places: id of a finding -> the first of its rows: number of the file and line.
        details: id of a finding -> more words about its first row.
        lengths: tokens of a whole row, before it is cut -> rows.
        ended: rows with an end-of-turn token that is trained.
        served: rows that were rendered as a server would.
        largest: the largest token id; -1 without tokens.
        template, markers: there is a chat template; it has generation markers.
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    ended: int = 0
    served: int = 0
    largest: int = -1
    template: bool = False
    markers: bool = False

    def note(self, name: str, file: int, line: int, detail: str = "") -> None:
        """Count one row."""
        self.counts[name] += 1
        places = self.places.setdefault(name, [])
        if len(places) < NAMED:
            places.append((file, line))
        if detail:
            self.details.setdefault(name, detail)

    def add(self, later: EncodeStats) -> None:
        """Add the counts of rows that come after these."""
        self.counts += later.counts
        for name, found in later.places.items():
            places = self.places.setdefault(name, [])
            places += found[: NAMED - len(places)]
        self.details = {**later.details, **self.details}
        self.lengths += later.lengths
        self.ended += later.ended
        self.served += later.served
        self.largest = max(self.largest, later.largest)
        self.template |= later.template
        self.markers |= later.markers

    def to_json(self) -> dict[str, Any]:
        return {
            "counts": self.counts,
            "places": self.places,
            "details": self.details,
            "lengths": sorted(self.lengths.items()),
            **{name: getattr(self, name) for name in _PLAIN},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> EncodeStats:
        return cls(
            Counter(found["counts"]),
            {
                name: [(int(file), int(line)) for file, line in places]
                for name, places in found["places"].items()
            },
            dict(found["details"]),
            Counter({int(length): int(rows) for length, rows in found["lengths"]}),
            **{name: found[name] for name in _PLAIN},
        )


_PLAIN = ("ended", "served", "largest", "template", "markers")


class StatsCollector:
    """Collects `stats` of rows as they are encoded.

    Args:
        sources: the numbers of the files; one that is not in it yet is added.
    """

    def __init__(self, encoder: Encoder, sources: dict[Path, int] | None = None) -> None:
        template = encoder.renderer.template
        self.stats = EncodeStats(
            template=template is not None, markers=bool(MARKERS.search(template or ""))
        )
        self.sources: dict[Path, int] = {} if sources is None else sources
        self._renderer, self._bos = encoder.renderer, encoder.bos
        self._waiting: list[Record] = []
        self._closers = encoder.renderer.end_of_turn_names() if self.stats.template else []

    def rendered(self, record: Record, rendered: Rendered) -> None:
        """A row as text: whose words are trained."""
        self._waiting.append(record)
        self.sources.setdefault(record.source, len(self.sources))
        if record.text is not None:
            if any(name in record.text for name in self._closers):
                self._of(record, "rendered-text")
            return
        for name in self._trained_words(record, rendered):
            self._of(record, name)

    def encoded(self, encoded: Sequence[Encoded]) -> None:
        """The rows since the last time, as tokens: what of them is left, and whether they end."""
        records, self._waiting = self._waiting, []
        looked_at = (row for row in encoded if row.dropped != "preference pair")
        for record, row in zip(records, looked_at, strict=True):
            self.stats.lengths[row.length] += 1
            if row.dropped:
                self._of(record, _DROPPED[row.dropped])
                continue
            if any(document.ends for document in row.documents):
                self.stats.ended += 1
            elif row.cut != "mid-turn":
                self._of(record, "no-end")
            if row.cut == "mid-turn":
                self._of(record, "cut-in-answer")
        for at in _sample(len(records)):
            self._serve(records[at])

    def columns(self, columns: Columns) -> None:
        """Their tokens, all together."""
        tokens_T, lengths_D = columns.tokens_T, columns.lengths_D
        self.stats.largest = int(tokens_T.max(initial=self.stats.largest))
        if self._bos is None or not len(tokens_T):
            return
        starts_D = np.cumsum(lengths_D) - lengths_D
        second_D = np.minimum(starts_D + 1, len(tokens_T) - 1)
        twice_D = (tokens_T[starts_D] == self._bos) & (tokens_T[second_D] == self._bos)
        for at in np.flatnonzero(twice_D & (lengths_D > 1)).tolist():
            self.stats.note("double-bos", int(columns.sources_D[at]), int(columns.lines_D[at]))

    def _of(self, record: Record, name: str, detail: str = "") -> None:
        self.stats.note(name, self.sources[record.source], record.line, detail)

    def _serve(self, record: Record) -> None:
        if not self.stats.template or record.messages is None:
            return
        self.stats.served += 1
        if difference := serving_difference(self._renderer, record):
            self._of(record, "serving-differs", difference)

    def _trained_words(self, record: Record, rendered: Rendered) -> set[str]:
        """Findings about words that are not the assistant's, and trained all the same."""
        found = set()
        for index, message in enumerate(record.messages or ()):
            if message.role == "assistant" or message.weight is not None:
                continue  # said by the row itself
            words = message.content.strip()
            at = rendered.text.find(words) if words else -1
            if at >= 0 and _trained(rendered, at) and self._stands(record, index, rendered):
                system = message.role in ("system", "developer")
                found.add("system-trained" if system else "prompt-trained")
        return found

    def _stands(self, record: Record, index: int, rendered: Rendered) -> bool:
        """Whether the place of a message in the text is trained; the same words may stand in what
        the assistant says."""
        assert record.messages is not None
        try:
            before = self._renderer.before(record, index)
        except RenderError:
            return False
        return before is not None and _trained(rendered, len(before))


def _sample(rows: int) -> list[int]:
    """Some of so many rows: one of each of equal stretches, at another place in each, since rows
    may alternate."""
    wanted = min(rows, SERVED_OF_A_CHUNK)
    bounds = [rows * n // wanted for n in range(wanted + 1)] if wanted else []
    return [a + 5 * n % (b - a) for n, (a, b) in enumerate(pairwise(bounds))]


def _trained(rendered: Rendered, at: int) -> bool:
    return any(span.start <= at < span.stop for span in rendered.spans)


def serving_difference(renderer: Renderer, record: Record) -> str | None:
    """What differs before the first turn where something does; None if nothing does.

    Looked at are the assistant's turns that are trained.

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
        if (difference := _difference(renderer.prompt(record, turn), text, turn))
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
