"""Lines of a JSONL file as JSON objects, each fault found where it stands.

A file is read in binary, one bounded line at a time, so that a line of any length costs at most
`MAX_LINE_BYTES` of memory. The decoder is strict where `json` is lenient: a repeated key, `NaN` and
`Infinity` are faults, because other readers of the same file would see something else.

A file of another format becomes JSONL first (`readers/`): line N of it is row N, and a row that
could not be read has its faults in place of an object (`unread`).

What an object means is `rows.py`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

from vox_core.bounded_json import repeated

MAX_LINE_BYTES = 10_000_000
BOM = b"\xef\xbb\xbf"
_UTF_16 = "it is UTF-16, expected UTF-8: iconv -f utf-16 -t utf-8 OLD > NEW makes it that"
_SPREADSHEET = (
    "it is a spreadsheet or an archive, expected rows as text: save a spreadsheet as CSV (UTF-8), "
    "and name that"
)
_MARKS = {
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
    b"\x1f\x8b": "it is compressed by gzip: name it .gz, and it is read",
    b"PK\x03\x04": _SPREADSHEET,  # ZIP: .xlsx, .ods
    b"\xd0\xcf\x11\xe0": _SPREADSHEET,  # OLE: .xls
}
"""How files begin that are no text, or none in UTF-8."""
_UNREAD = b"\x15"
"""NAK, which begins no JSON."""


class RowError(Exception):
    """What is wrong with one line; `faults` holds one text for each thing, without the place."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Each line that is not blank, with its number from 1; None for one that is too long.

    A byte order mark at the start of the file is dropped.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(BOM)
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                _skip_rest_of_line(file)
                yield number, None
            elif line and not line.isspace():
                yield number, line


def _skip_rest_of_line(file: IO[bytes]) -> None:
    while (part := file.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
        pass


def no_text(start: bytes) -> str | None:
    """What a file is that begins so, if that is no text in UTF-8."""
    return next((meaning for mark, meaning in _MARKS.items() if start.startswith(mark)), None)


def other_format(path: Path) -> str | None:
    """What the file is instead of JSON Lines, if its first line gives that away."""
    first = next((line for _, line in numbered_lines(path)), None) or b""
    if meaning := no_text(first):
        return meaning
    start = first.removeprefix(BOM).lstrip()[:1]
    if start == b"[":
        return (
            "it is a JSON array, expected one object a line: name it .json, and it is read as one"
        )
    if start not in (b"{", b"", _UNREAD) and first.count(b",") > 0 and b"{" not in first:
        return "it looks like CSV, expected one JSON object a line: name it .csv, and it is read"
    return None


def parse_object(line: bytes | None, unit: str = "line") -> dict[str, object]:
    """The JSON object that `line` holds; None stands for a line that was too long to read.

    Args:
        unit: what the bytes are in their file, for the words of a fault: a line, or a row.

    Raises:
        RowError: it holds none.
    """
    if line is None:
        raise too_long(unit)
    if line[:1] == _UNREAD:
        raise RowError(*_faults_of(line))
    value = parse_value(_decode(line, unit).rstrip("\r\n"), unit)
    if not isinstance(value, dict):
        raise RowError(f"found {json_type(value)}, expected a JSON object")
    return value


def too_long(unit: str) -> RowError:
    """What is said of a line that nobody reads."""
    return RowError(f"found a {unit} of more than {MAX_LINE_BYTES:,} bytes, expected less")


def unread(fault: RowError) -> bytes:
    """A line that stands for a row which could not be read: `parse_object` raises its faults."""
    return _UNREAD + json.dumps(fault.faults).encode()


def _faults_of(line: bytes) -> list[str]:
    try:
        return [str(text) for text in json.loads(line[1:])]
    except ValueError:
        return ["found a control character (0x15) at the start of the line, expected JSON"]


def json_type(value: object) -> str:
    """What JSON calls `value`, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _decode(line: bytes, unit: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            f"found invalid UTF-8 at byte {error.start} of the {unit} (0x{line[error.start]:02x}), "
            "expected UTF-8"
        ) from None


def parse_value(text: str, unit: str = "line") -> object:
    """The JSON value that `text` holds.

    Raises:
        RowError: it holds none, or one that other readers would see otherwise.
    """
    try:
        value: object = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        raise RowError(_invalid(error, unit)) from None
    except RecursionError:
        raise RowError("found JSON nested too deeply, expected a flat row") from None
    except ValueError as error:  # an integer of thousands of digits
        raise RowError(f"found a number that cannot be read ({error})") from None
    return value


def _invalid(error: json.JSONDecodeError, unit: str) -> str:
    if unit == "line":
        expected = "expected one JSON object on one line"
        return f"found invalid JSON at column {error.colno} ({error.msg}), {expected}"
    place = f"line {error.lineno}, column {error.colno} of the {unit}"
    return f"found invalid JSON at {place} ({error.msg}), expected a JSON object"


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RowError(f'found the key "{repeated(keys)}" more than once, expected it once')
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RowError(f"found {name}, which JSON does not have, expected a number, a string or null")
