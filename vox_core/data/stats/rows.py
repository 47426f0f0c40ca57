"""Rows counted, in one pass and little memory: some 24 bytes a row, and the sample.

Each row goes through `read_row`, so a row is malformed here exactly where `vox data check` finds a
fault. A file of another format is counted as the JSONL that it is read as (`readers/`).
"""

from __future__ import annotations

import gc
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vox_core.data.faults import RowError
from vox_core.data.jsonl import BOM, MAX_LINE_BYTES
from vox_core.data.records import readable
from vox_core.data.rows import NO_ATTRIBUTES, Attributes, Row, read_row

SAMPLE = 2000
SAMPLE_CHARACTERS = 600
ATTRIBUTES = ("category", "lane", "rating", "difficulty", "response_mode", "task_family")
_MOST_VALUES = 10_000
"""Different values of an attribute that are told apart."""
_OTHER = "other values"
_BLOCK_BYTES = 1 << 20

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Counts:
    """What was counted.

    Args:
        characters, digests, lines, files: of each row: characters of what is said, a digest of it,
            where it stands.
        roles: sequence of roles -> rows; a text has none.
        forms: name of a form, as `vox data check` says it -> rows.
        attributes: name -> value -> rows.
        sample: what some rows say, spread over all of them.
        malformed: rows that cannot be read.
    """

    forms: Counter[str] = field(default_factory=Counter)
    roles: Counter[tuple[str, ...]] = field(default_factory=Counter)
    characters: array[int] = field(default_factory=lambda: array("q"))
    digests: array[int] = field(default_factory=lambda: array("q"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    first: list[int] = field(default_factory=list)
    attributes: dict[str, Counter[str | float]] = field(default_factory=dict)
    sample: list[str] = field(default_factory=list)
    malformed: int = 0
    _stride: int = 1

    @property
    def rows(self) -> int:
        return len(self.digests)

    def say(self, form: str, roles: tuple[str, ...], texts: Sequence[str], line: int) -> None:
        """One row."""
        self.forms[form] += 1
        self.roles[roles] += 1
        said = "\n".join(texts)
        if not len(self.digests) % self._stride:
            self._take(said)
        self.characters.append(len(said) - len(texts) + 1)
        self.digests.append(hash((roles, said)))
        self.lines.append(line)

    def say_attributes(self, found: Attributes) -> None:
        """Count the values of one row's `ATTRIBUTES`."""
        for name in ATTRIBUTES:
            if (value := getattr(found, name)) is not None:
                counts = self.attributes.setdefault(name, Counter())
                known = value in counts or len(counts) < _MOST_VALUES
                counts[value if known else _OTHER] += 1

    def _take(self, said: str) -> None:
        """Into the sample, which is thinned out when it is twice as large as it has to be."""
        self.sample.append(said[:SAMPLE_CHARACTERS])
        if len(self.sample) == 2 * SAMPLE:
            self.sample = self.sample[::2]
            self._stride *= 2


def count(
    paths: Sequence[Path], progress: Progress | None = None, lines: Sequence[Path] = ()
) -> Counts:
    """Count the rows of some files.

    Args:
        progress: told of the bytes read and all bytes.
        lines: for each file, the JSONL with its rows; the file itself, if not given.

    Raises:
        DataError: D001, a file cannot be read.
    """
    counts, done = Counts(), 0
    pairs = list(zip(paths, lines or paths, strict=True))
    total = sum(_size(*pair) for pair in pairs)
    with _no_collections():
        for path, rows in pairs:
            counts.first.append(counts.rows)
            for size in _count_lines(counts, path, rows):
                done += size
                if progress:
                    progress(done, total)
    return counts


def _size(path: Path, lines: Path) -> int:
    with readable(path):
        return lines.stat().st_size


def _count_lines(counts: Counts, path: Path, lines: Path) -> Iterator[int]:
    """Bytes of each block of lines, when it is counted."""
    number = 1
    with readable(path), lines.open("rb") as file:
        while data := file.read(_BLOCK_BYTES):
            data += file.readline(MAX_LINE_BYTES + 1) if not data.endswith(b"\n") else b""
            _count_block(counts, data.removeprefix(BOM) if number == 1 else data, number)
            number += data.count(b"\n")
            yield len(data)


def _count_block(counts: Counts, data: bytes, first: int) -> None:
    for number, line in enumerate(data.split(b"\n"), start=first):
        if line and not line.isspace():
            try:
                _count_row(counts, read_row(line if len(line) <= MAX_LINE_BYTES else None), number)
            except RowError:
                counts.malformed += 1


def _count_row(counts: Counts, row: Row, line: int) -> None:
    roles = tuple(message.role for message in row.messages)
    texts = [message.content for message in row.messages] or [row.text]
    counts.say(row.form, roles, texts, line)
    if row.attributes is not NO_ATTRIBUTES:
        counts.say_attributes(row.attributes)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Rows are trees that go when they are left; looking for cycles would find none."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
