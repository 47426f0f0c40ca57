"""The shapes of rows that are written plainly, known without making anything of them.

A file's rows are mostly written alike: the same names in the same order, no space but one after a
comma or colon, texts and numbers. A regular expression that is made of the first such row says of
the next ones that they are of its shape (`quick.Shape`) in a sixth of the time that orjson and a
look at the values take; what it does not match is left to these, so it need not know everything
that JSON allows. What it matches is a usual row with nothing wrong: each name stands there once,
because the expression has it once, and a text holds a character that is no white space, because
one is asked for.

Not here: whether a line is UTF-8, of which an expression of bytes knows nothing; `Shapes` asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeAlias

from vox_core.data.attributes import WORDS
from vox_core.data.jsonl import MAX_LINE_BYTES
from vox_core.data.quick import Shape, usual_row

Match: TypeAlias = Callable[[bytes], re.Match[bytes] | None]

_MOST = 4
"""Expressions that a line is held against."""
_MAX_NAMES = 1000
"""Bytes of the names that an expression is made of."""
_MAX_LINE = 1 << 16
"""Bytes: each escape in a text costs `re` memory, and a long line is soon parsed for its length."""

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
_NUMBER = rb"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?"
_TEXTS = rb"\[(?:" + _ANY_TEXT + rb"(?:, ?" + _ANY_TEXT + rb")*)?\]"
_VALUES = {
    **dict.fromkeys(WORDS, (_ANY_TEXT, rb"null")),
    "rating": (_NUMBER, rb"null"),
    "difficulty": (_ANY_TEXT, _NUMBER, rb"null"),
    "tags": (_TEXTS, rb"null"),
}
_OTHER = (_ANY_TEXT, _NUMBER, _TEXTS, rb"true", rb"false", rb"null")


class Shapes:
    """What shape a line's row has, for the lines of a file or two; it learns how they are
    written."""

    def __init__(self) -> None:
        self._matches: list[tuple[Match, Shape]] = []
        self._known: set[Shape] = set()

    def of(self, line: bytes) -> Shape | None:
        """The shape of a line whose row is a usual one with nothing wrong, as `usual_row` gives it;
        None where that is not certain."""
        if len(line) > MAX_LINE_BYTES:
            return None
        if len(line) <= _MAX_LINE:
            for match, shape in self._matches:
                if match(line) and (line.isascii() or _is_utf8(line)):
                    return shape
        if (usual := usual_row(line)) is None:
            return None
        values, shape = usual
        if len(self._matches) < _MOST and shape not in self._known:
            self._learn(tuple(values), shape)
        return shape

    def _learn(self, names: tuple[str, ...], shape: Shape) -> None:
        self._known.add(shape)
        if sum(map(len, names)) <= _MAX_NAMES:
            self._matches.append((re.compile(expression(names, shape), re.DOTALL).fullmatch, shape))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def expression(names: tuple[str, ...], shape: Shape) -> bytes:
    """Of rows of this shape whose names stand in this order, with or without the end of a line."""
    fields = [_written(name) + rb": ?" + _value(name, shape) for name in names]
    return rb"\{" + rb", ?".join(fields) + rb"\}[ \r\n]*+"


def _written(name: str) -> bytes:
    return re.escape(json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def _value(name: str, shape: Shape) -> bytes:
    if name in shape.names:
        return _conversation() if shape.group == "messages" else _TEXT
    if name == "input" and shape.input:
        return _MAYBE_EMPTY
    return rb"(?:" + rb"|".join(_VALUES.get(name, _OTHER)) + rb")"


def _conversation() -> bytes:
    """System first or not at all, then users and assistants, one assistant at least."""
    user, answer, anyone = _turn(rb"user"), _turn(rb"assistant"), _turn(rb"(?:user|assistant)")
    opening = rb"(?:" + _turn(rb"system") + rb", ?)?(?:" + user + rb", ?)*"
    return rb"\[" + opening + answer + rb"(?:, ?" + anyone + rb")*\]"


def _turn(role: bytes) -> bytes:
    return rb'\{"role": ?"' + role + rb'", ?"content": ?' + _TEXT + rb"\}"
