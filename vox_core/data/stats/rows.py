"""Rows counted, in one pass and little memory: some 24 bytes a row, and the sample.

A row of a usual form is looked at as the object that orjson makes of it, because making a `Record`
of it takes several times as long as `json.loads`. What is usual is learnt: the first row with these
fields, and the first with these roles, goes through `parse_row`, like every row that has anything
unusual about it. So a row is counted as malformed where `vox data check` finds a fault, but for
repeated keys and the like, which are looked for there alone.

A file of another format is counted as the JSONL that it is read as (`readers/`).
"""

from __future__ import annotations

import gc
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from vox_core.data.jsonl import BOM, MAX_LINE_BYTES, RowError, parse_object
from vox_core.data.records import readable
from vox_core.data.rows import Row, parse_row

SAMPLE = 2000
SAMPLE_CHARACTERS = 600
ATTRIBUTES = ("category", "lane", "rating", "difficulty", "response_mode", "task_family")
_MOST_VALUES = 10_000
"""Different values of an attribute that are told apart."""
_OTHER = "other values"
_BLOCK_BYTES = 1 << 20
_MOST_SHAPES = 1000
_PAIR = ("user", "assistant")
_FIELDS = {
    "messages": {"messages"},
    "prompt/completion": {"prompt", "completion"},
    "text": {"text"},
}
"""Name of a form -> the fields of its usual rows."""

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Counts:
    """What was counted.

    Args:
        characters, digests, lines, files: of each row: characters of what is said, a digest of it,
            where it stands.
        roles: sequence of roles -> rows; a text has none.
        forms: name of a form, as `vox data check` says it -> rows.
        shapes: fields of a usual row, in order -> its form, and whether it has attributes.
        attributes: name -> value -> rows.
        sample: what some rows say, spread over all of them.
        malformed: rows that cannot be read.
    """

    forms: Counter[str] = field(default_factory=Counter)
    roles: Counter[tuple[str, ...]] = field(default_factory=Counter)
    shapes: dict[tuple[str, ...], tuple[str, bool]] = field(default_factory=dict)
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

    def say_attributes(self, values: tuple[Any, ...], rows: int) -> None:
        """So many rows with these values of `ATTRIBUTES`."""
        for name, value in zip(ATTRIBUTES, values, strict=True):
            if value is not None and value != ():
                counts = self.attributes.setdefault(name, Counter())
                known = value in counts or len(counts) < _MOST_VALUES
                counts[value if known else _OTHER] += rows

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
    loads, shapes, attributes = orjson.loads, counts.shapes, Counter[Any]()
    for number, line in enumerate(data.split(b"\n"), start=first):
        try:
            fields = loads(line)
            form, more = shapes[tuple(fields)]
            if more:
                values = tuple(map(fields.get, ATTRIBUTES))
                hash(values)
            usual = _count_usual(counts, form, fields, number)
        except (ValueError, TypeError, KeyError, AttributeError):
            usual = False
        if not usual:
            if line and not line.isspace():
                _count_slowly(counts, line, number)
        elif more:
            attributes[values] += 1
    for values, rows in attributes.items():
        counts.say_attributes(values, rows)


def _count_usual(counts: Counts, form: str, fields: dict[str, Any], line: int) -> bool:
    """Count a row as it is; False, or whatever a look at it raises, if it is not a usual one."""
    if form == "messages":
        messages = fields["messages"]
        roles = tuple([message["role"] for message in messages])
        texts = [message["content"] for message in messages]
        if not roles or roles not in counts.roles or sum(map(len, messages)) != 2 * len(roles):
            return False
    elif form == "text":
        roles, texts = (), [fields["text"]]
    else:
        roles, texts = _PAIR, [fields["prompt"], fields["completion"]]
    if not all(map(str.strip, texts)):
        return False
    counts.say(form, roles, texts, line)
    return True


def _count_slowly(counts: Counts, line: bytes, number: int) -> None:
    try:
        fields = parse_object(line)
        row = parse_row(fields)
    except RowError:
        counts.malformed += 1
        return
    _count_row(counts, row, number)
    usual = _FIELDS.get(row.form)
    if usual and usual <= fields.keys() <= {*usual, *ATTRIBUTES, *row.unused}:
        more = not fields.keys().isdisjoint(ATTRIBUTES)
        if len(counts.shapes) < _MOST_SHAPES:
            counts.shapes[tuple(fields)] = row.form, more


def _count_row(counts: Counts, row: Row, line: int) -> None:
    if row.kind == "text":
        counts.say(row.form, (), [row.text or ""], line)
    else:
        messages = row.messages or ()
        roles = tuple(message.role for message in messages)
        counts.say(row.form, roles, [message.content for message in messages], line)
    found = row.attributes
    counts.say_attributes(tuple(getattr(found, name) for name in ATTRIBUTES), 1)


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
