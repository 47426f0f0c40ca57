"""Rows of a JSON document, one at a time: an array of objects, an object with one such array, or
objects one after another.

The document is cut into its rows by the brackets and quotation marks in it, without being parsed,
so that it may be larger than memory; each row is then read as strictly as a line of JSONL. A row
that is wrong in itself leaves the others readable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

from vox_core.data.faults import RowError, RowFault
from vox_core.data.fields import CONTENT
from vox_core.data.jsonl import BOM, MAX_LINE_BYTES, parse_object, parse_value, too_long

_CHUNK = 1 << 20
_MAX_KEY = 10_000
_BLANK = b" \t\r\n"
_DEEPER = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}
_NEXT = re.compile(rb'["\[\]{},:]')
_BETWEEN_BRACKETS = re.compile(rb'(?:[^"\[\]{}]+|"[^"\\]*(?:\\.[^"\\]*)*")*', re.DOTALL)
_WITHIN_TEXT = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
Read: TypeAlias = Callable[[int], bytes]
Row: TypeAlias = "dict[str, object] | RowError"
"""A row, or the faults of one."""


def json_rows(read: Callable[[], Read]) -> Iterator[Row]:
    """Each row, or what is wrong with it.

    Args:
        read: opens the document at its beginning; it is called twice.

    Raises:
        RowError: from here on nothing can be read.
    """
    shape = _shape(_Cursor(read()))
    cursor = _Cursor(read())
    if shape == "array":
        cursor.next()
        yield from _elements(cursor)
        _require_end(cursor)
    elif shape == "wrapped":
        cursor.next()
        yield from _of_the_one_list(cursor)
        _require_end(cursor)
    else:
        while cursor.peek():
            yield _row(cursor.value(b"", one=True))


def _shape(cursor: _Cursor) -> Literal["array", "wrapped", "objects"]:
    """What the document is, by its beginning: an object with a field of a row's is a row."""
    first = cursor.peek()
    if first == b"[":
        return "array"
    if first != b"{":
        return "objects"
    cursor.next()
    for name, begins in _members(cursor):
        if name in CONTENT:
            return "objects"
        if begins == b"[":
            return "wrapped"
        cursor.value(b",}")
    return "objects"


def _of_the_one_list(cursor: _Cursor) -> Iterator[Row]:
    found: list[str] = []
    for name, begins in _members(cursor):
        if begins != b"[":
            cursor.value(b",}")
            continue
        found.append(name)
        if len(found) > 1:
            names = f"several lists ({', '.join(found)})"
            raise RowError(RowFault("several forms", (), names, "one list of rows"))
        cursor.next()
        yield from _elements(cursor)


def _members(cursor: _Cursor) -> Iterator[tuple[str, bytes]]:
    """Name and first byte of the value of each member of an object; who asks reads the value."""
    while cursor.peek() != b"}":
        key = cursor.value(b":,}", most=_MAX_KEY)
        if cursor.next() != b":" or not key:
            raise _broken("an object that is no JSON", "names with values")
        yield str(parse_value(key.decode("utf-8", "replace"), "document")), cursor.peek()
        if cursor.peek() != b",":
            break
        cursor.next()
    if cursor.next() != b"}":
        raise _broken("the end of the document within an object", '"}"')


def _elements(cursor: _Cursor) -> Iterator[Row]:
    """What stands between the brackets of a list, the first of which has been read."""
    if cursor.peek() == b"]":
        cursor.next()
        return
    while True:
        element = cursor.value(b",]")
        if element == b"":
            yield _broken("nothing between two commas or brackets", "an object")
        else:
            yield _row(element)
        match cursor.next():
            case b"]":
                return
            case b"":
                raise _broken("the end of the document within the list", '"]"')


def _row(element: bytes | None) -> Row:
    if element is None:
        return too_long("row")
    try:
        return parse_object(element, "row")
    except RowError as fault:
        return fault


def _broken(found: str, expected: str) -> RowError:
    return RowError(RowFault("invalid JSON", (), found, expected))


def _require_end(cursor: _Cursor) -> None:
    if cursor.peek():
        raise _broken("more after the end of the document", "nothing")


class _Cursor:
    """A place in a document, and what follows it."""

    def __init__(self, read: Read) -> None:
        self._read, self._at = read, 0
        self._data = read(max(_CHUNK, len(BOM))).removeprefix(BOM)

    def peek(self) -> bytes:
        """The next byte that is no white space; empty at the end."""
        while True:
            while self._at < len(self._data):
                if self._data[self._at] not in _BLANK:
                    return self._data[self._at : self._at + 1]
                self._at += 1
            if not self._more():
                return b""

    def next(self) -> bytes:
        """The same, and it is passed over."""
        found = self.peek()
        self._at += len(found)
        return found

    def value(self, ends: bytes, *, most: int = MAX_LINE_BYTES, one: bool = False) -> bytes | None:
        """All up to one of `ends` outside of all brackets and texts, which is left; None if that is
        more than `most` bytes.

        Args:
            one: end after the first bracket that closes all, too.
        """
        self.peek()
        kept, depth, in_text = _Kept(most), 0, False
        while True:
            start = self._at
            if in_text:
                in_text = self._rest_of_text()
            else:
                found = _NEXT.search(self._data, self._between(depth))
                self._at = found.end() if found else len(self._data)
                mark = found[0] if found else b""
                if not depth and mark and mark in ends:
                    self._at -= 1
                    kept.add(self._data[start : self._at])
                    return kept.whole()
                in_text = mark == b'"'
                depth = max(0, depth + _DEEPER.get(mark, 0))
                if one and not depth and mark in (b"]", b"}"):
                    kept.add(self._data[start : self._at])
                    return kept.whole()
            kept.add(self._data[start : self._at])
            if self._at >= len(self._data) - 1 and not self._more() and self._at == start:
                kept.add(self._data[start:])
                self._at = len(self._data)
                return kept.whole()

    def _between(self, depth: int) -> int:
        """Where to look for what counts: within brackets, texts and commas do not."""
        passed = _BETWEEN_BRACKETS.match(self._data, self._at) if depth else None
        return passed.end() if passed else self._at

    def _rest_of_text(self) -> bool:
        """Pass over what is left of a text; whether there may be more of it."""
        found = _WITHIN_TEXT.match(self._data, self._at)
        assert found is not None
        self._at = found.end()
        if self._data[self._at : self._at + 1] == b'"':
            self._at += 1
            return False
        return True

    def _more(self) -> bool:
        """Read on; what has been passed over is let go."""
        data = self._read(_CHUNK)
        if data:
            self._data, self._at = self._data[self._at :] + data, 0
        return bool(data)


class _Kept:
    """Bytes up to a limit."""

    def __init__(self, most: int) -> None:
        self._parts: list[bytes] = []
        self._size, self._most = 0, most

    def add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= self._most:
            self._parts.append(part)
        else:
            self._parts.clear()

    def whole(self) -> bytes | None:
        return None if self._size > self._most else b"".join(self._parts).strip(_BLANK)
