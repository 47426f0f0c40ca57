"""Lines of a JSONL file as JSON objects, each fault found where it stands.

A file is read in binary, one bounded line at a time, so that a line of any length costs at most
`MAX_LINE_BYTES` of memory. The decoder is strict where `json` is lenient: a repeated key, `NaN` and
`Infinity` are faults, because other readers of the same file would see something else.

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
            elif line.strip():
                yield number, line


def _skip_rest_of_line(file: IO[bytes]) -> None:
    while (part := file.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
        pass


def other_format(path: Path) -> str | None:
    """What the file is instead of JSON Lines, if its first line gives that away."""
    first = next((line for _, line in numbered_lines(path)), None) or b""
    start = first.removeprefix(BOM).lstrip()[:1]
    if start == b"[":
        return f"it is a JSON array, expected one object a line: jq -c '.[]' {path} > rows.jsonl"
    if start not in (b"{", b"") and first.count(b",") > 0 and b"{" not in first:
        return "it looks like CSV, expected one JSON object a line"
    return None


def parse_object(line: bytes | None) -> dict[str, object]:
    """The JSON object that `line` holds; None stands for a line that was too long to read.

    Raises:
        RowError: it holds none.
    """
    if line is None:
        raise RowError(f"found a line of more than {MAX_LINE_BYTES:,} bytes, expected less")
    value = _parse(_decode(line))
    if not isinstance(value, dict):
        raise RowError(f"found {json_type(value)}, expected a JSON object")
    return value


def json_type(value: object) -> str:
    """What JSON calls `value`, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            f"found invalid UTF-8 at byte {error.start} of the line (0x{line[error.start]:02x}), "
            "expected UTF-8"
        ) from None


def _parse(text: str) -> object:
    try:
        value: object = json.loads(
            text.rstrip("\r\n"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        raise RowError(
            f"found invalid JSON at column {error.colno} ({error.msg}), "
            "expected one JSON object on one line"
        ) from None
    except RecursionError:
        raise RowError("found JSON nested too deeply, expected a flat row") from None
    except ValueError as error:  # an integer of thousands of digits
        raise RowError(f"found a number that cannot be read ({error})") from None
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RowError(f'found the key "{repeated(keys)}" more than once, expected it once')
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RowError(f"found {name}, which JSON does not have, expected a number, a string or null")
