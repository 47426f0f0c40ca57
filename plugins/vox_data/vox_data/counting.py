"""Count rows in one pass: forms, roles, lengths, attributes, duplicates and a sample of texts.

A row takes 32 bytes, and 8 for each number among its attributes, the sample aside. A row counts as
malformed where `vox data check` finds a fault in it.

Shape legend: P pairs of a row and the earlier row that it repeats.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vox_core.api.rows import Record, RowError, RowSource, digests, duplicates, read_lines

SAMPLE = 2000
SAMPLE_CHARACTERS = 600
ATTRIBUTES = ("category", "lane", "rating", "difficulty", "response_mode", "task_family")
_MOST_VALUES = 10_000
"""Distinct values counted per attribute."""
_OTHER = "other values"
_NAMED = 5

Progress = Callable[[int, int], None]
"""Called with bytes read and all bytes."""


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Rows that say the same as an earlier one.

    Args:
        rows: that repeat an earlier one.
        repeated: distinct rows that are repeated.
        first: the first few of `rows`, each with the row that it repeats, as `FILE:LINE`.
    """

    rows: int
    repeated: int
    first: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Counts:
    """Counts over all rows of some files.

    Args:
        characters, digests, lines: per row: characters, content digest (16 bytes), line number.
        first: per file, the index of its first row.
        roles: sequence of roles -> rows; a text has none.
        forms: name of a form, as `vox data check` prints it -> rows.
        attributes: name -> value -> rows.
        numbers: name of an attribute -> its values that are numbers, one per row.
        sample: texts of some rows, spread evenly over all.
    """

    forms: Counter[str] = field(default_factory=Counter)
    roles: Counter[tuple[str, ...]] = field(default_factory=Counter)
    characters: array[int] = field(default_factory=lambda: array("q"))
    digests: bytearray = field(default_factory=bytearray)
    lines: array[int] = field(default_factory=lambda: array("q"))
    first: list[int] = field(default_factory=list)
    attributes: dict[str, Counter[str | float]] = field(default_factory=dict)
    numbers: dict[str, array[float]] = field(default_factory=dict)
    sample: list[str] = field(default_factory=list)
    malformed: int = 0
    _stride: int = 1

    @property
    def rows(self) -> int:
        return len(self.lines)

    def add(self, record: Record) -> None:
        """Count one row."""
        messages = record.messages or ()
        said = "\n".join([m.content for m in messages]) if messages else record.text or ""
        self.forms[record.form] += 1
        self.roles[tuple([m.role for m in messages])] += 1
        if not self.rows % self._stride:
            self._take(said)
        self.characters.append(len(said) - max(0, len(messages) - 1))
        self.digests += digests(record)[1]
        self.lines.append(record.line)
        for name in ATTRIBUTES:
            if (value := getattr(record.attributes, name)) is not None:
                counts = self.attributes.setdefault(name, Counter())
                counts[value if value in counts or len(counts) < _MOST_VALUES else _OTHER] += 1
                if isinstance(value, float):
                    self.numbers.setdefault(name, array("d")).append(value)

    def _take(self, said: str) -> None:
        """Add to the sample; at twice its size, keep every second text."""
        self.sample.append(said[:SAMPLE_CHARACTERS])
        if len(self.sample) == 2 * SAMPLE:
            self.sample = self.sample[::2]
            self._stride *= 2

    def duplicates(self, sources: Sequence[RowSource]) -> Duplicates:
        """Rows that repeat an earlier row of `sources`, the files that were counted."""
        pairs_P2 = duplicates(np.frombuffer(self.digests, np.uint64).reshape(-1, 2))
        return Duplicates(
            len(pairs_P2),
            len(np.unique(pairs_P2[:, 1])),
            tuple(
                (self._place(sources, row), self._place(sources, first))
                for row, first in pairs_P2[:_NAMED].tolist()
            ),
        )

    def _place(self, sources: Sequence[RowSource], row: int) -> str:
        file = int(np.searchsorted(self.first, row, side="right")) - 1
        return f"{sources[file].path}:{self.lines[row]}"


def count(sources: Sequence[RowSource], progress: Progress | None = None) -> Counts:
    """Count the rows of opened data files.

    Raises:
        DataError: D001, a file cannot be read.
    """
    counts, before = Counts(), 0
    total = sum(source.lines.stat().st_size for source in sources)
    for source in sources:
        counts.first.append(counts.rows)

        def tell(_label: str, done: int, _size: int, before: int = before) -> None:
            if progress:
                progress(before + done, total)

        for _, found in read_lines(source.path, source.lines, tell, answers="optional"):
            if isinstance(found, RowError):
                counts.malformed += 1
            else:
                counts.add(found)
        before += source.lines.stat().st_size
    return counts
