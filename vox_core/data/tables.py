"""Rows of CSV, TSV and text files.

Of a table the first row names the columns, and every other has as many cells.

Cells are texts; empty ones and ratings of NaN are not there. What a text cannot be is read out of
it: messages, tools and tags from JSON, a rating from a number, a label from True or False. A row
with more or fewer cells than columns is a fault: what follows a comma that should have been quoted
would stand in the wrong column. Names of which no row can be made are one fault, of the header.

A text file is one document of the form text: blank lines separate paragraphs, not documents. One of
more than `PIECE` bytes is several documents, each cut at a line end, because a row has a bounded
size. Lines end in a line feed, whatever the file has.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from vox_core.data.faults import Code, FileError, RowError, RowFault, faulty
from vox_core.data.fields import FieldMap, mapped
from vox_core.data.json_rows import BOM, MAX_LINE_BYTES, bounded_lines, parse_value, too_long
from vox_core.data.rows import refuse_columns
from vox_core.text import hint

PIECE = 4_000_000
_NOT_TEXTS = ("messages", "turns", "conversations", "chosen", "rejected", "tools", "tags")
_NUMBERS = ("rating", "difficulty")
_LABELS = {"true": True, "false": False, "1": True, "0": False}
_SEPARATORS = {
    "\t": ("tabs", "name it .tsv, and it is read"),
    ";": (
        "semicolons",
        "save it with commas (in a spreadsheet, the field separator when saving as CSV)",
    ),
    ",": ("commas", "name it .csv, and it is read"),
}
_TOO_LONG = "\ud800"
"""Stands for a line that is too long."""
_UNREADABLE = re.compile(f"[{_TOO_LONG}\udc80-\udcff]")
"""That, or a byte that is not UTF-8, as "surrogateescape" decodes it."""


def table_rows(
    path: Path, delimiter: str, fields: FieldMap
) -> Iterator[dict[str, object] | RowError]:
    """Yield each row below the header, as texts, or its faults; RowError where nothing more can be
    read."""
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        with path.open("rb") as file:
            reader = csv.reader(_texts(file), delimiter=delimiter, strict=True)
            names = _names(reader, delimiter, fields)
            for cells in reader:
                if cells:
                    yield _row(names, cells, reader.line_num)
    except csv.Error as error:
        # Where a quotation is broken nobody knows where the next row begins.
        found = f"a row that is no CSV ({error}; line {reader.line_num})"
        expected = "CSV: neither it nor what comes after it in the file can be read"
        raise faulty("table", (), found, expected) from None
    finally:
        csv.field_size_limit(limit)


def _texts(file: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(bounded_lines(file)):
        data = line if number or line is None else line.removeprefix(BOM)
        yield _TOO_LONG if data is None else data.decode("utf-8", "surrogateescape")


def _names(reader: Iterator[list[str]], delimiter: str, fields: FieldMap) -> list[str]:
    """Return the names of the columns; a `FileError` if they make no row."""

    def wrong(code: Code, found: str, expected: str) -> FileError:
        return FileError(RowFault(code, (), found, expected))

    try:
        names = next(reader, [])
    except csv.Error as error:
        raise wrong("table", f"a first row that is no CSV ({error})", "names") from None
    other = next((s for s in _SEPARATORS if len(names) == 1 and s in names[0]), None)
    if other:
        (wanted, _), (looks, remedy) = _SEPARATORS[delimiter], _SEPARATORS[other]
        found = f"one column {json.dumps(names[0], ensure_ascii=False)}"
        expected = f"columns with {wanted} between; it looks separated by {looks}: {remedy}"
        raise wrong("other format", found, expected)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise wrong("repeated key", f'the column "{twice}" more than once', "it once")
    names = [name or f"column {number}" for number, name in enumerate(names, start=1)]
    try:
        _require_readable(names, names, 1)
        if names:
            refuse_columns([*mapped(dict.fromkeys(names, ""), fields)])
    except RowError as fault:
        lost = [path for path in fields.values() if path and path not in names]
        note = "".join(f'; no column "{path}"{hint(path, names)}' for path in lost)
        named = (replace(each, found=f"{each.found} in the header{note}") for each in fault.faults)
        raise FileError(*named) from None
    return names


def _row(names: list[str], cells: list[str], line: int) -> dict[str, object] | RowError:
    try:
        _require_readable(names, cells, line)
    except RowError as fault:
        return fault
    if len(cells) != len(names):
        found = f"{len(cells)} cell{'s' if len(cells) > 1 else ''}"
        return faulty("table", (), found, f"{len(names)} ({', '.join(names)}; line {line})")
    return {name: cell for name, cell in zip(names, cells, strict=True) if cell}


def _require_readable(names: Sequence[str], cells: Sequence[str], line: int) -> None:
    """Refuse a cell that is not UTF-8, or of a line that is too long (RowError)."""
    for index, cell in enumerate(cells):
        if not cell.isascii() and (found := _UNREADABLE.search(cell)):
            if found[0] == _TOO_LONG:
                raise too_long("line")
            at = (names[index],) if index < len(names) and cells is not names else ()
            byte = f"invalid UTF-8 (0x{ord(found[0]) - 0xDC00:02x}, line {line})"
            raise faulty("invalid UTF-8", at, byte, "UTF-8")


def with_values(values: dict[str, object]) -> dict[str, object]:
    """Return the texts of a row as what they stand for."""
    return {name: _value(name, value) for name, value in values.items()}


def _value(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    if name in _NOT_TEXTS and value.lstrip().startswith(("[", "{")):
        try:
            return parse_value(value, "cell")
        except RowError as fault:
            inner = (replace(each, location=(name, *each.location)) for each in fault.faults)
            raise RowError(*inner) from None
    if name in _NUMBERS:
        with suppress(ValueError):
            number = float(value)
            return None if math.isnan(number) else number
    return _LABELS.get(value.lower(), value) if name == "label" else value


# --- text files -----------------------------------------------------------------------------------


def text_rows(path: Path) -> Iterator[dict[str, object]]:
    """Each document that says something; RowError at bytes that are no UTF-8."""
    with path.open("rb") as file:
        while data := file.read(PIECE):
            start = file.tell() - len(data)
            end = _end(data)
            file.seek(start + end)
            try:
                text = data[:end].decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                byte = f"0x{data[error.start]:02x}, byte {start + error.start}"
                raise faulty("invalid UTF-8", (), f"invalid UTF-8 ({byte})", "UTF-8") from None
            text = text if start else text.removeprefix("\ufeff")
            if text.strip():
                yield {"text": text}


def _end(data: bytes) -> int:
    """Return the end of a document: of the file, of the last line, or of a character."""
    if len(data) < PIECE:
        return len(data)
    if end := data.rfind(b"\n") + 1:
        return end
    end = len(data)
    while end and data[end - 1] & 0xC0 == 0x80:  # the character's first byte stays with the rest
        end -= 1
    return max(1, end - 1)
