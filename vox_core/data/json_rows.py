"""Rows of JSON files: each a JSON object, and each fault found where it stands.

A JSONL file is read in binary, one bounded line at a time, so that a line of any length costs at
most `MAX_LINE_BYTES` of memory. The decoder is strict where `json` is lenient: a repeated key,
`NaN` and `Infinity` are faults, because other readers of the same file would see something else. A
file of another format becomes JSONL first (`source.py`): line N of it is row N, and a row that
could not be read has its faults in place of an object (`unread`).

A JSON document has its rows in an array of objects, in the one such array of an object, or as
objects one after another. It is read as a whole, and cut into rows by the brackets and commas
outside of its texts, without being parsed. A row that is wrong in itself leaves the others
readable.

What an object means is `rows.py`'s business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, NoReturn, TypeAlias

from vox_core.bounded_json import repeated
from vox_core.data.faults import FileError, RowError, RowFault, faulty, json_type
from vox_core.data.fields import CONTENT

MAX_LINE_BYTES = 10_000_000
BOM = b"\xef\xbb\xbf"


def _other(found: str, expected: str) -> RowFault:
    return RowFault("other format", (), found, expected)


_UTF_16 = _other("UTF-16", "UTF-8: iconv -f utf-16 -t utf-8 OLD > NEW makes it that")
_SPREADSHEET = _other(
    "a spreadsheet or an archive", "rows as text: save a spreadsheet as CSV (UTF-8), and name that"
)
_MARKS = {
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
    b"\x1f\x8b": _other("gzip data", "plain text: name it .gz, and it is read"),
    b"PK\x03\x04": _SPREADSHEET,  # ZIP: .xlsx, .ods
    b"\xd0\xcf\x11\xe0": _SPREADSHEET,  # OLE: .xls
}
"""How files begin that are no text, or none in UTF-8."""
_UNREAD = b"\x15"
"""NAK, which begins no JSON."""
_WHOLE = _UNREAD + b" "
"""The same of a whole file."""


def bounded_lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Each line with its end; None for one that is too long."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (part := file.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
            pass
        yield None


def raw_lines(path: Path) -> Iterator[tuple[int, int, bytes | None]]:
    """Each line that is not blank: its number from 1, where it begins, and its bytes; None for one
    that is too long. A byte order mark at the start of the file is dropped."""
    with path.open("rb") as file:
        start = len(BOM) if file.read(len(BOM)) == BOM else 0
        file.seek(start)
        for number, line in enumerate(bounded_lines(file), start=1):
            if line is None or line.strip():
                yield number, start, line
            start = file.tell()


def no_text(start: bytes) -> RowFault | None:
    """Recognise the first bytes of a file that is not UTF-8 text; None if they may be."""
    return next((meaning for mark, meaning in _MARKS.items() if start.startswith(mark)), None)


def file_faults(path: Path) -> list[RowFault]:
    """Faults of a whole file that its first line shows: another format, or faults that a reader
    wrote there."""
    first = next((line for _, _, line in raw_lines(path)), None) or b""
    if meaning := no_text(first):
        return [meaning]
    if first.startswith(_WHOLE):
        return _faults_of(first)
    start = first.removeprefix(BOM).lstrip()[:1]
    if start == b"[":
        expected = "one object a line: name it .json, and it is read as one"
        return [_other("a JSON array", expected)]
    if start not in (b"{", b"", _UNREAD) and first.count(b",") > 0 and b"{" not in first:
        return [_other("CSV or text", "JSON lines: name a table .csv, a text .txt, and it is read")]
    return []


def parse_object(line: bytes | None, unit: str = "line") -> dict[str, object]:
    """The JSON object that `line` holds, or a RowError; None stands for a line too long to read.

    Args:
        unit: what the bytes are in their file, for the words of a fault: a line, or a row.
    """
    if line is None:
        raise too_long(unit)
    if line[:1] == _UNREAD:
        raise RowError(*_faults_of(line))
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"invalid UTF-8 at byte {error.start} of the {unit} (0x{line[error.start]:02x})"
        raise faulty("invalid UTF-8", (), found, "UTF-8") from None
    value = parse_value(text.rstrip("\r\n"), unit)
    if not isinstance(value, dict):
        raise faulty("no object", (), json_type(value), "a JSON object")
    return value


def too_long(unit: str) -> RowError:
    return faulty("line too long", (), f"a {unit} of more than {MAX_LINE_BYTES:,} bytes", "less")


def unread(fault: RowError) -> bytes:
    """A line that stands for a row which could not be read: `parse_object` raises its faults."""
    mark = _WHOLE if isinstance(fault, FileError) else _UNREAD
    return mark + json.dumps([each.to_json() for each in fault.faults]).encode()


def _faults_of(line: bytes) -> list[RowFault]:
    try:
        return [RowFault.from_json(each) for each in json.loads(line[1:])]
    except (ValueError, TypeError):
        found = "a control character (0x15) at the start of the line"
        return [RowFault("invalid JSON", (), found, "JSON")]


def parse_value(text: str, unit: str = "line") -> object:
    """Parse a JSON value, strictly: a `RowError` for what other readers would see otherwise."""
    try:
        value: object = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place, expected = f"column {error.colno}", "one JSON object on one line"
        if unit != "line":
            place, expected = f"line {error.lineno}, {place} of the {unit}", "a JSON object"
        found = f"invalid JSON at {place} ({error.msg})"
        raise faulty("invalid JSON", (), found, expected) from None
    except RecursionError:
        raise faulty("invalid JSON", (), "JSON nested too deeply", "a flat row") from None
    except ValueError as error:  # an integer of thousands of digits
        found = f"a number that cannot be read ({error})"
        raise faulty("invalid JSON", (), found, "a shorter one") from None
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        found = f'the key "{repeated([key for key, _ in pairs])}" more than once'
        raise faulty("repeated key", (), found, "it once")
    return value


def _refuse_constant(name: str) -> NoReturn:
    found = f"{name}, which JSON does not have"
    raise faulty("invalid JSON", (), found, "a number, a string or null")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{},:]', re.DOTALL)
"""A text, or a bracket, comma or colon outside of texts."""

Row: TypeAlias = "dict[str, object] | RowError"


def json_rows(path: Path) -> Iterator[Row]:
    """Yield each row of a document, or its faults; RowError where nothing more can be read."""
    data = path.read_bytes().removeprefix(BOM)
    marks, begin = _marks(data), data.lstrip()[:1]
    if begin == b"[":
        end = yield from _of_list(data, marks, next(marks) + 1)
    elif begin == b"{" and _has_list(data):
        end = yield from _of_members(data, marks)
    else:
        end = yield from _of_objects(data, marks)
    if data[end:].strip():
        raise _broken("more after the end of the document", "nothing")


def _marks(data: bytes) -> Iterator[int]:
    """Yield the place of each bracket, comma and colon outside of texts."""
    places = (found.start() for found in _MARK.finditer(data))
    return (at for at in places if data[at] != ord('"'))


def _of_list(data: bytes, marks: Iterator[int], start: int) -> Generator[Row, None, int]:
    """Rows of the list that begins at `start`, behind its bracket; returns where it ends."""
    first, depth = start, 0
    for at in marks:
        if data[at] in b"[{":
            depth += 1
        elif depth:
            depth -= data[at] in b"]}"
        elif data[at] in b",]":
            row, ended = data[start:at].strip(), data[at] in b"]"
            if row or start != first or not ended:
                yield _row(row)
            if ended:
                return at + 1
            start = at + 1
    if rest := data[start:].strip():
        yield _row(rest)
    raise _broken("the end of the document within the list", '"]"')


def _has_list(data: bytes) -> bool:
    """Whether the first object is no row itself and has a list."""
    key = depth = 0
    for at in _marks(data):
        if depth == 1 and data[at] in b"[:":
            name = data[key:at].strip(b' \t\r\n"').decode("utf-8", "replace")
            if data[at] in b"[" or name in CONTENT:
                return data[at] in b"["
            key = at + 1
        elif data[at] in b"[{,":
            depth, key = depth + (data[at] not in b","), at + 1
        elif data[at] in b"]}":
            depth -= 1
            if depth <= 0:
                break
    return False


def _of_members(data: bytes, marks: Iterator[int]) -> Generator[Row, None, int]:
    """Rows of the one list in an object; returns where the object ends."""
    depth = lists = 0
    for at in marks:
        if data[at] in b"[" and depth == 1:
            lists += 1
            if lists > 1:
                raise faulty("several forms", (), "several lists", "one list of rows")
            yield from _of_list(data, marks, at + 1)
        elif data[at] in b"[{":
            depth += 1
        elif data[at] in b"]}":
            depth -= 1
            if not depth:
                return at + 1
    raise _broken("the end of the document within an object", '"}"')


def _of_objects(data: bytes, marks: Iterator[int]) -> Generator[Row, None, int]:
    """Objects that follow one another; returns where they end."""
    start = depth = 0
    for at in marks:
        if data[at] in b"[{":
            depth += 1
        elif data[at] in b"]}":
            depth = max(0, depth - 1)
            if not depth:
                yield _row(data[start : at + 1].strip())
                start = at + 1
    if rest := data[start:].strip():
        yield _row(rest)
    return len(data)


def _row(data: bytes) -> Row:
    if not data:
        return _broken("nothing between two commas or brackets", "an object")
    if len(data) > MAX_LINE_BYTES:
        return too_long("row")
    try:
        return parse_object(data, "row")
    except RowError as fault:
        return fault


def _broken(found: str, expected: str) -> RowError:
    return faulty("invalid JSON", (), found, expected)
