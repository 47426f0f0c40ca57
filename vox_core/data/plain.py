"""The shapes of rows that are written plainly, known without making anything of them.

A file's rows are mostly written alike: the same names in the same order, no space but one after a
comma or colon, texts and numbers. A regular expression that is made of the first such row says of
the next ones that they are of its shape (`quick.Shape`), short ones in a quarter of the time that
orjson and a look at the values take; what it does not match is left to these, so it need not know
everything that JSON allows. What it matches is a usual row with nothing wrong: each name stands
there once, because the expression has it once, and a text holds a character that is no white space,
because one is asked for.

Not here: whether a line is UTF-8, of which an expression of bytes knows nothing; `Shapes` asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from vox_core.data.attributes import WORDS
from vox_core.data.jsonl import MAX_LINE_BYTES
from vox_core.data.quick import Shape, usual_row

Match: TypeAlias = Callable[[bytes], re.Match[bytes] | None]

_MOST, _MOST_TRIED = 4, 64
"""Expressions that a line is held against, those that matched last first; and shapes for which one
is made."""
_MAX_NAMES = 1000
"""Bytes of the names that an expression is made of."""
_MAX_LINE = 2048
"""Bytes; a longer line is parsed as quickly, for its length."""
_MOST_MISSES = 1000
"""Lines that matched nothing; if they are more than those that did, no more are held against it."""

# Of single characters alone are repeats possessive (`*+`): groups have mistakes before Python
# 3.11.5. Nothing matches in two ways, so that giving back takes no longer than going on did.
_PLAIN = rb'[^"\\\x00-\x1f]*+'
_ESCAPE = (
    rb'\\(?:["\\/bfnrt]|u(?:[0-9a-cA-CefEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2}'
    rb"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_REST = _PLAIN + rb"(?:" + _ESCAPE + _PLAIN + rb")*"
# ASCII, or how a character begins that is no white space, in UTF-8 or as an escape.
_BLACK = (
    rb'(?:[!#-\[\]-~\xc3-\xe0\xe4-\xf4]|\xe3[\x81-\xbf]|\\["\\/]'
    rb"|\\u(?:00[c-fC-F]|0[1-9a-fA-F].|30[4-9a-fA-F]|[4-9a-fA-F]..).)"
)
_SAID = rb"(?: |\\[nrt])*(?=" + _BLACK + rb")" + _REST
_TEXT = rb'"' + _SAID + rb'"'
_MAYBE_EMPTY = rb'"(?:' + _SAID + rb')?"'
_ANY_TEXT = rb'"' + _REST + rb'"'
_NUMBER = rb"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,17})?(?:[eE][+-]?[0-9]{1,2})?"
_TEXTS = rb"\[(?:" + _ANY_TEXT + rb"(?:, ?" + _ANY_TEXT + rb")*)?\]"
_VALUES = {
    **dict.fromkeys(WORDS, (_ANY_TEXT, rb"null")),
    "rating": (_NUMBER, rb"null"),
    "difficulty": (_ANY_TEXT, _NUMBER, rb"null"),
    "tags": (_TEXTS, rb"null"),
}
_ANYTHING = rb"(?:" + rb"|".join((_ANY_TEXT, _NUMBER, _TEXTS, rb"true|false|null")) + rb")"
"""But objects, whose names would have to be known, and lists of them."""


class Shapes:
    """What shape a line's row has, for the lines of a file or two; it learns how they are
    written."""

    def __init__(self) -> None:
        self._matches: list[tuple[Match, Shape]] = []
        self._known: set[Shape] = set()
        self._hits = self._misses = 0

    def of(self, line: bytes) -> Shape | None:
        """The shape of a line whose row is a usual one with nothing wrong, as `usual_row` gives it;
        None where that is not certain."""
        if len(line) > MAX_LINE_BYTES:
            return None
        if len(line) <= _MAX_LINE:
            for place, (match, shape) in enumerate(self._matches):
                if match(line) and (line.isascii() or _is_utf8(line)):
                    self._hits += 1
                    if place:
                        self._matches.insert(0, self._matches.pop(place))
                    return shape
        if (usual := usual_row(line)) is None:
            return None
        values, shape = usual
        if len(line) <= _MAX_LINE:
            self._learn_of(line, values, shape)
        return shape

    def _learn_of(self, line: bytes, values: dict[str, Any], shape: Shape) -> None:
        """From a usual row that matched nothing."""
        self._misses += 1
        if self._misses > max(_MOST_MISSES, self._hits):
            self._matches.clear()
        elif shape not in self._known and len(self._known) < _MOST_TRIED:
            self._learn(line, values, shape)

    def _learn(self, line: bytes, values: dict[str, Any], shape: Shape) -> None:
        """An expression that does not even match its own row would match none."""
        self._known.add(shape)
        if _length_of_names(values) > _MAX_NAMES:
            return
        match = re.compile(expression(values, shape), re.DOTALL).fullmatch
        if match(line):
            self._matches = [(match, shape), *self._matches[: _MOST - 1]]


def _length_of_names(values: Mapping[str, object]) -> int:
    within = [value for value in values.values() if isinstance(value, dict)]
    return sum(len(name) for names in (values, *within) for name in names)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def expression(values: Mapping[str, Any], shape: Shape) -> bytes:
    """Of rows of this shape that are written as the one with these values: with the same names in
    the same order, with or without the end of a line."""
    fields = {name: _value(name, value, shape) for name, value in values.items()}
    return _object(fields) + rb"[ \r\n]*+"


def _object(fields: Mapping[str, bytes]) -> bytes:
    pairs = [_written(name) + rb": ?" + value for name, value in fields.items()]
    return rb"\{" + rb", ?".join(pairs) + rb"\}"


def _written(name: str) -> bytes:
    return re.escape(json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def _value(name: str, value: object, shape: Shape) -> bytes:
    if name in shape.names:
        return _conversation() if shape.group == "messages" else _TEXT
    if name == "input" and shape.input:
        return _MAYBE_EMPTY
    if name in _VALUES:
        return rb"(?:" + rb"|".join(_VALUES[name]) + rb")"
    if not isinstance(value, dict):
        return _ANYTHING
    return _object(dict.fromkeys(value, _ANYTHING))  # of what is in it, no more objects


def _conversation() -> bytes:
    """System first or not at all, then users and assistants, one assistant at least."""
    user, answer, anyone = _turn(rb"user"), _turn(rb"assistant"), _turn(rb"(?:user|assistant)")
    opening = rb"(?:" + _turn(rb"system") + rb", ?)?(?:" + user + rb", ?)*"
    return rb"\[" + opening + answer + rb"(?:, ?" + anyone + rb")*\]"


def _turn(role: bytes) -> bytes:
    return rb'\{"role": ?"' + role + rb'", ?"content": ?' + _TEXT + rb"\}"
