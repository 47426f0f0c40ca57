"""Rows of CSV, TSV and text files.

Of a table the first row names the columns, and every other has as many cells.

Cells are texts; an empty one is not there. What a text cannot be is read out of it: messages, tools
and tags from JSON, a rating from a number. A row with more or fewer cells than there are columns is
a fault: what follows a comma that should have been quoted would stand in the wrong column. Names
of which no row can be made are one fault, of the header.

A text file is one document of the form text: blank lines separate paragraphs, not documents. One of
more than `PIECE` bytes is several documents, each cut at a line end, because a row has a bounded
size. Lines end in a line feed, whatever the file has.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from vox_core.data.faults import FileError, RowError, RowFault
from vox_core.data.jsonl import BOM, MAX_LINE_BYTES, no_text, parse_value
from vox_core.data.readers.opened import Stream

PIECE = 4_000_000
_JSON_STARTS = ("[", "{")
_NOT_TEXTS = ("messages", "turns", "conversations", "chosen", "rejected", "tools", "tags")
_NUMBERS = ("rating", "difficulty")
_SEPARATORS = {"\t": "tabs", ";": "semicolons", ",": "commas"}
_REMEDIES = {
    "\t": "name it .tsv, and it is read",
    ";": "save it with commas (in a spreadsheet, the field separator when saving as CSV)",
    ",": "name it .csv, and it is read",
}


def table_rows(
    stream: Stream, delimiter: str, refuse: Callable[[Sequence[str]], None]
) -> Iterator[dict[str, object] | RowError]:
    """Each row below the names, as texts, or what is wrong with it.

    Args:
        refuse: called with the names; raises a RowError if no row can be made of them.

    Raises:
        RowError: from here on nothing can be read.
    """
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        lines = _Lines(stream)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        names = _names(reader, delimiter)
        if names:
            _refuse_header(names, refuse)
        while True:
            try:
                if cells := next(reader):
                    yield _row(names, cells, lines.number)
            except StopIteration:
                return
            except csv.Error as error:
                # Where a quotation is broken nobody knows where the next row begins.
                found = f"a row that is no CSV ({error}; line {lines.number})"
                expected = "CSV: neither it nor what comes after it in the file can be read"
                yield RowError(RowFault("table", (), found, expected))
                return
            except _BadLine as error:
                yield RowError(*error.faults)
    finally:
        csv.field_size_limit(limit)


def _refuse_header(names: list[str], refuse: Callable[[Sequence[str]], None]) -> None:
    try:
        refuse(names)
    except RowError as fault:
        faults = (replace(each, found=f"{each.found} in the header") for each in fault.faults)
        raise FileError(*faults) from None


def with_values(values: dict[str, object]) -> dict[str, object]:
    """The texts of a row as what they stand for.

    Raises:
        RowError: one that should be JSON is none.
    """
    return {name: _value(name, value) for name, value in values.items()}


def _value(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    if name in _NOT_TEXTS and value.lstrip().startswith(_JSON_STARTS):
        try:
            return parse_value(value, "cell")
        except RowError as fault:
            inner = (replace(each, location=(name, *each.location)) for each in fault.faults)
            raise RowError(*inner) from None
    if name in _NUMBERS:
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _names(reader: Iterator[list[str]], delimiter: str) -> list[str]:
    """The names of the columns.

    Raises:
        FileError: they are no such names.
    """
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise FileError(
            RowFault("table", (), f"a first row that is no CSV ({error})", "names")
        ) from None
    if len(names) == 1:
        _require_separated(names[0], delimiter)
    if twice := next((name for name in names if names.count(name) > 1), None):
        found = f'the column "{twice}" more than once'
        raise FileError(RowFault("repeated key", (), found, "it once"))
    return [name or f"column {number}" for number, name in enumerate(names, start=1)]


def _require_separated(only: str, delimiter: str) -> None:
    """Raises:
    FileError: the only column looks like several, with another separator.
    """
    if found := next((s for s in _SEPARATORS if s in only and s != delimiter), None):
        column = f"one column {json.dumps(only, ensure_ascii=False)}"
        expected = (
            f"columns with {_SEPARATORS[delimiter]} between; it looks separated by "
            f"{_SEPARATORS[found]}: {_REMEDIES[found]}"
        )
        raise FileError(RowFault("other format", (), column, expected))


def _row(names: list[str], cells: list[str], line: int) -> dict[str, object] | RowError:
    if len(cells) != len(names):
        found = f"{len(cells)} cell{'s' if len(cells) > 1 else ''}"
        expected = f"{len(names)} ({', '.join(names)}; line {line})"
        return RowError(RowFault("table", (), found, expected))
    return {name: cell for name, cell in zip(names, cells, strict=True) if cell}


class _BadLine(RowError):
    """A line that cannot be given to csv."""


class _Lines:
    """Lines as text; one that is none is raised, and the next one can still be had."""

    def __init__(self, stream: Stream) -> None:
        self._lines, self.number = stream.lines(), 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        if isinstance(line, RowError):
            raise _BadLine(*line.faults)
        if self.number == 1:
            if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise RowError(RowFault("other format", (), "UTF-16", "UTF-8"))
            line = line.removeprefix(BOM)
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            found = f"0x{line[error.start]:02x}, byte {error.start} of line {self.number}"
            fault = RowFault("invalid UTF-8", (), f"invalid UTF-8 ({found})", "UTF-8")
            raise _BadLine(fault) from None


# --- text files -----------------------------------------------------------------------------------


def text_rows(stream: Stream) -> Iterator[dict[str, object]]:
    """Each document that says something.

    Raises:
        RowError: the file is no UTF-8; nothing more can be read.
    """
    data, offset = stream.read(PIECE), 0
    if meaning := no_text(data):
        raise FileError(meaning)
    data = data.removeprefix(BOM)
    while data:
        data += stream.read(PIECE - len(data))
        end = _end(data)
        text = _decode(data[:end], offset).replace("\r\n", "\n")
        if text.strip():
            yield {"text": text}
        data, offset = data[end:], offset + end
        data = data or stream.read(PIECE)


def _end(data: bytes) -> int:
    """Where a document ends: with the file, after the last line end, or between characters."""
    if len(data) < PIECE:
        return len(data)
    if end := data.rfind(b"\n") + 1:
        return end
    end = len(data)
    while end and data[end - 1] & 0xC0 == 0x80:  # the character's first byte stays with the rest
        end -= 1
    return max(1, end - 1)


def _decode(data: bytes, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"invalid UTF-8 (0x{data[error.start]:02x}, byte {offset + error.start})"
        raise RowError(RowFault("invalid UTF-8", (), found, "UTF-8")) from None
