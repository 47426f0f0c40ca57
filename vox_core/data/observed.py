"""What is noticed of rows while they are tokenised, and kept in the cache with their tokens.

Each block of rows is looked at once, where its tokens are made (`parts.py`), so a second start has
all of it without reading a row or loading a tokenizer. Counts are of all rows, and the first few of
each kind are named; only whether the model would be asked with the text that it was trained on is
looked at in some rows of every chunk.

What is worth telling, and in which words, is decided later (`audit`): these are counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vox_core.data.encode import Encoded, Encoder
from vox_core.data.records import Record
from vox_core.data.render import Rendered, RenderError
from vox_core.data.serving import serving_difference

if TYPE_CHECKING:
    from vox_core.data.documents import Columns

NAMED = 5
"""Rows that are named of each kind."""
SERVED_OF_A_CHUNK = 8
"""Rows of some hundred that are rendered as they would be asked, too."""
MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Noted(NamedTuple):
    """How many rows, and the first of them: number of the file and line."""

    total: int
    first: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """Counts of some rows.

    Args:
        noted: id of a finding -> its rows.
        details: id of a finding -> more words about its first row.
        lengths: tokens of a whole row, before it is cut -> rows.
        ended: rows with an end-of-turn token that is trained.
        served: rows that were rendered as they would be asked.
        largest: the largest token id; -1 without tokens.
        template, markers: there is a chat template; it has generation markers.
    """

    noted: Mapping[str, Noted] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[int, int] = field(default_factory=dict)
    ended: int = 0
    served: int = 0
    largest: int = -1
    template: bool = False
    markers: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "noted": {name: [noted.total, noted.first] for name, noted in self.noted.items()},
            "details": dict(self.details),
            "lengths": sorted(self.lengths.items()),
            **{name: getattr(self, name) for name in _PLAIN},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Observed:
        noted = {
            str(name): Noted(int(count), tuple((int(file), int(line)) for file, line in rows))
            for name, (count, rows) in found["noted"].items()
        }
        lengths = {int(length): int(rows) for length, rows in found["lengths"]}
        plain = {name: found[name] for name in _PLAIN}
        return cls(noted, dict(found["details"]), lengths, **plain)


_PLAIN = ("ended", "served", "largest", "template", "markers")


class Tally:
    """Sums what was observed, in the order of the rows."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._rows: dict[str, list[tuple[int, int]]] = {}
        self._details: dict[str, str] = {}
        self._lengths: Counter[int] = Counter()
        self._ended = self._served = 0
        self._largest = -1
        self._template = self._markers = False

    def note(self, name: str, file: int, line: int, detail: str = "") -> None:
        """One row."""
        self._counts[name] += 1
        rows = self._rows.setdefault(name, [])
        if len(rows) < NAMED:
            rows.append((file, line))
        if detail:
            self._details.setdefault(name, detail)

    def add(self, other: Observed) -> None:
        for name, noted in other.noted.items():
            rows = self._rows.setdefault(name, [])
            rows += noted.first[: NAMED - len(rows)]
            self._counts[name] += noted.total
        self._details = {**other.details, **self._details}
        self._lengths.update(other.lengths)
        self._ended += other.ended
        self._served += other.served
        self._largest = max(self._largest, other.largest)
        self._template |= other.template
        self._markers |= other.markers

    def observed(self) -> Observed:
        return Observed(
            {name: Noted(count, tuple(self._rows[name])) for name, count in self._counts.items()},
            dict(self._details),
            dict(self._lengths),
            self._ended,
            self._served,
            self._largest,
            self._template,
            self._markers,
        )


class Observer(Tally):
    """Looks at rows as they are encoded.

    Args:
        sources: the numbers of the files; one that is not in it yet is added.
    """

    def __init__(self, encoder: Encoder, sources: dict[Path, int] | None = None) -> None:
        super().__init__()
        self.sources: dict[Path, int] = {} if sources is None else sources
        self._renderer, self._bos = encoder.renderer, encoder.bos
        self._template = encoder.renderer.template is not None
        self._markers = bool(MARKERS.search(encoder.renderer.template or ""))
        self._waiting: list[Record] = []
        self._closers = encoder.renderer.end_of_turn_names() if self._template else []

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
            self._lengths[row.length] += 1
            if row.dropped:
                self._of(record, _DROPPED[row.dropped])
                continue
            if any(document.ends for document in row.documents):
                self._ended += 1
            elif row.cut != "mid-turn":
                self._of(record, "no-end")
            if row.cut == "mid-turn":
                self._of(record, "cut-in-answer")
        for at in _sample(len(records)):
            self._serve(records[at])

    def columns(self, columns: Columns) -> None:
        """Their tokens, all together."""
        tokens_T, lengths_D = columns.tokens_T, columns.lengths_D
        self._largest = int(tokens_T.max(initial=self._largest))
        if self._bos is None or not len(tokens_T):
            return
        starts_D = np.cumsum(lengths_D) - lengths_D
        second_D = np.minimum(starts_D + 1, len(tokens_T) - 1)
        twice_D = (tokens_T[starts_D] == self._bos) & (tokens_T[second_D] == self._bos)
        for at in np.flatnonzero(twice_D & (lengths_D > 1)).tolist():
            self.note("double-bos", int(columns.sources_D[at]), int(columns.lines_D[at]))

    def _of(self, record: Record, name: str, detail: str = "") -> None:
        self.note(name, self.sources[record.source], record.line, detail)

    def _serve(self, record: Record) -> None:
        if not self._template or record.messages is None:
            return
        self._served += 1
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


_DROPPED = {
    "nothing to train": "nothing-trained",
    "nothing to train within seq_len": "cut-before-answer",
}


def _sample(rows: int) -> list[int]:
    """Some of so many rows: one of each of equal stretches, at another place in each, since rows
    may alternate."""
    wanted = min(rows, SERVED_OF_A_CHUNK)
    bounds = [rows * n // wanted for n in range(wanted + 1)] if wanted else []
    return [a + 5 * n % (b - a) for n, (a, b) in enumerate(pairwise(bounds))]


def _trained(rendered: Rendered, at: int) -> bool:
    return any(span.start <= at < span.stop for span in rendered.spans)
