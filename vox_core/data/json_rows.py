"""Rows of a JSON document, one at a time: an array of objects, an object with one such array, or
objects one after another.

The document is cut into its rows by the brackets and commas outside of its texts, without being
parsed, so that it may be larger than memory; each row is then read as strictly as a line of JSONL.
A row that is wrong in itself leaves the others readable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, TypeAlias

from vox_core.data.faults import RowError, faulty
from vox_core.data.fields import CONTENT
from vox_core.data.jsonl import BOM, MAX_LINE_BYTES, parse_object, too_long

_CHUNK = 1 << 20
_MARK = re.compile(rb'["\[\]{},:]')
_WITHIN_TEXT = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)

Row: TypeAlias = "dict[str, object] | RowError"
Marks: TypeAlias = Iterator[tuple[int, bytes]]
Cut: TypeAlias = Callable[[int, int], bytes]


def json_rows(path: Path) -> Iterator[Row]:
    """Yield each row of a document, or its faults.

    Raises:
        RowError: from here on nothing can be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file, path.open("rb") as other:

        def cut(start: int, end: int) -> bytes:
            """A part of the document without the blanks around it, and of a part that is too long
            for a row its beginning."""
            other.seek(start)
            data = other.read(min(end - start, MAX_LINE_BYTES + 1))
            if len(data) > MAX_LINE_BYTES:
                return data
            return (data if start else data.removeprefix(BOM)).strip()

        begin = cut(0, 1 << 16)[:1]
        is_wrapped = begin == b"{" and _has_list(_marks(file), cut)
        file.seek(0)
        marks = _marks(file)
        if begin == b"[":
            end = yield from _of_list(marks, cut, next(marks)[0] + 1)
        elif is_wrapped:
            end = yield from _of_members(marks, cut)
        else:
            end = yield from _of_objects(marks, cut, size)
        if cut(end, size):
            raise _broken("more after the end of the document", "nothing")


def _of_list(marks: Marks, cut: Cut, start: int) -> Generator[Row, None, int]:
    """Rows of the list that begins at `start`, behind its bracket; returns where it ends."""
    first, depth = start, 0
    for at, mark in marks:
        if mark in b"[{":
            depth += 1
        elif depth:
            depth -= 1 if mark in b"]}" else 0
        elif mark in b",]":
            row = cut(start, at)
            if row or start != first or mark == b",":
                yield _row(row)
            if mark == b"]":
                return at + 1
            start = at + 1
    if rest := cut(start, start + MAX_LINE_BYTES + 1):
        yield _row(rest)
    raise _broken("the end of the document within the list", '"]"')


def _has_list(marks: Marks, cut: Cut) -> bool:
    """Whether the first object is no row itself and has a list."""
    key = depth = 0
    for at, mark in marks:
        if depth == 1 and mark in b"[:":
            name = cut(key, at).strip(b'"').decode("utf-8", "replace")
            if mark == b"[" or name in CONTENT:
                return mark == b"["
        elif mark in b"[{,":
            depth, key = depth + (mark != b","), at + 1
        elif mark in b"]}":
            depth -= 1
            if depth <= 0:
                break
    return False


def _of_members(marks: Marks, cut: Cut) -> Generator[Row, None, int]:
    """Rows of the one list in an object; returns where the object ends."""
    depth = lists = 0
    for at, mark in marks:
        if mark == b"[" and depth == 1:
            lists += 1
            if lists > 1:
                raise faulty("several forms", (), "several lists", "one list of rows")
            yield from _of_list(marks, cut, at + 1)
        elif mark in b"[{":
            depth += 1
        elif mark in b"]}":
            depth -= 1
            if not depth:
                return at + 1
    raise _broken("the end of the document within an object", '"}"')


def _of_objects(marks: Marks, cut: Cut, size: int) -> Generator[Row, None, int]:
    """Objects that follow one another; returns where they end."""
    start = depth = 0
    for at, mark in marks:
        if mark in b"[{":
            depth += 1
        elif mark in b"]}":
            depth = max(0, depth - 1)
            if not depth:
                yield _row(cut(start, at + 1))
                start = at + 1
    if rest := cut(start, size):
        yield _row(rest)
    return size


def _marks(file: IO[bytes]) -> Marks:
    """Place and byte of each bracket, comma and colon outside of texts."""
    begin, in_text = 0, False
    while data := file.read(_CHUNK):
        while data.endswith(b"\\") and (more := file.read(1)):
            data += more
        at = 0
        while at < len(data):
            if in_text:
                text = _WITHIN_TEXT.match(data, at)
                assert text is not None
                at = text.end() + 1
                in_text = at > len(data)
            elif found := _MARK.search(data, at):
                at = found.end()
                in_text = found[0] == b'"'
                if not in_text:
                    yield begin + at - 1, found[0]
            else:
                break
        begin += len(data)


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
