"""How much an operation of a chat template may make, said before it makes it.

Bounds and not measures: an operator, a method of a text, a filter never makes more than what is
said here, up to a small factor. Their own values are counted as they are (`extent`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

BUDGET = 64 << 20
"""Characters that a rendering may make, its output among them; an item of a list counts as 64."""
LARGEST_INT = 100_000
"""Larger ones are refused as arguments: widths, precisions, repetitions."""
MAX_BITS = 20_000

_ITEM = 64
_WIDE = re.compile(r"\d{5,}|\*|\{[^{}]*\{")
# Filters that take text apart into single characters.
_APART = frozenset(
    {"list", "sort", "unique", "batch", "slice", "groupby", "map", "select", "reject"}
)
# Filters that make text of a value that is none.
_WRITES = frozenset(
    {"string", "upper", "lower", "trim", "escape", "e", "pprint", "urlencode", "xmlattr"}
)


class TooMuch(SecurityError):
    """The template takes more than a rendering may."""


def extent(value: Any, limit: int) -> int:
    """How much a value holds: characters, and `_ITEM` for everything in a container, each time it
    is in there. Counting ends where `limit` is passed."""
    if isinstance(value, str | bytes):
        return len(value)
    total, open_ = 0, [value]
    while open_ and total <= limit:
        item = open_.pop()
        if isinstance(item, str | bytes):
            total += len(item) + _ITEM
        elif isinstance(item, dict):
            total += _ITEM * len(item)
            open_ += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            total += _ITEM * len(item)
            open_ += item
        else:
            total += _ITEM
    return total


def extent_of_written(value: Any, limit: int) -> int:
    if isinstance(value, Namespace):
        raise TooMuch("the template writes a namespace out")
    return extent(value, limit)


def require_small(args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            raise TooMuch(f"the template calls for {'more' if value > 0 else 'less'} than it may")


def size_of_binop(operator: str, left: Any, right: Any) -> int:
    """Most of what the operator may make."""
    if operator == "%":
        return _size_of_format(left, (right,)) if isinstance(left, str | bytes) else 0
    if operator == "+":
        return sum(_length(side) for side in (left, right))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if bits > MAX_BITS or right.bit_length() > MAX_BITS:
            raise TooMuch("the template computes a number of thousands of digits")
        return 0
    if operator == "*":
        times = next((side for side in (left, right) if isinstance(side, int)), 0)
        return (extent(left, BUDGET) + extent(right, BUDGET)) * max(times, 0)
    return 0


def size_of_method(owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: Any) -> int:
    """Most of what a method of a text may make."""
    given = (*args, *kwargs.values())
    if name == "join":
        parts = args[0] if args and isinstance(args[0], list | tuple | dict) else ()
        return (len(parts) + 1) * len(owner) + extent(list(parts), BUDGET)
    if name in ("split", "rsplit") and given and isinstance(given[0], type(owner)) and given[0]:
        return len(owner) + 64 * (owner.count(given[0]) + 1)  # type: ignore[arg-type]
    if name in ("split", "rsplit", "splitlines"):
        return 32 * len(owner)
    if name == "replace":
        return _size_of_replace(owner, given)
    if name in ("format", "format_map"):
        return _size_of_format(owner, given)
    if name in ("expandtabs", "translate"):
        return len(owner) * max([8, *(_length(one) for one in given)])
    return len(owner) + max([0, *(one for one in given if isinstance(one, int))])


def _size_of_replace(text: str | bytes, given: tuple[Any, ...]) -> int:
    if len(given) < 2 or not all(isinstance(one, str | bytes) for one in given[:2]):
        return len(text)
    return len(text) + (text.count(given[0]) + 1) * len(given[1])


def _size_of_format(text: str | bytes, given: tuple[Any, ...]) -> int:
    plain = text if isinstance(text, str) else text.decode("latin-1")
    if _WIDE.search(plain):
        raise TooMuch("the template formats to a width that is too large")
    places = plain.count("%") + plain.count("{")
    return len(text) + places * (10_000 + 8 * extent(list(given), BUDGET))


def size_of_filter(name: str, value: Any, args: tuple[Any, ...], kwargs: Any, limit: int) -> int:
    """Most of what a filter may make of `value`, as far as it is not a small multiple."""
    given = (*args, *kwargs.values())
    text = value if isinstance(value, str) else ""
    if name == "tojson":
        written = 8 * extent_of_written(value, limit)
        return written * (1 + sum(_length(one) for one in given)) if given else written
    if name == "replace":
        return _size_of_replace(text, given)
    if name == "format":
        return _size_of_format(text, given)
    if name == "join":
        between = max([0, *(_length(one) for one in given)])
        return extent(value, limit) + between * _length(value)
    if name in ("indent", "wordwrap"):
        return _size_of_lines(text, given)
    if name in _APART:
        return 64 * len(text)
    if name in _WRITES and not text:
        return 8 * extent_of_written(value, limit)
    return len(text)


def _size_of_lines(text: str, given: tuple[Any, ...]) -> int:
    """With something before or after each line, at the most one for each character."""
    between = sum(len(one) for one in given if isinstance(one, str))
    width = max([4, *(one for one in given if isinstance(one, int))])
    return len(text) + (len(text) + 1) * between + (text.count("\n") + 1) * width


def _length(value: Any) -> int:
    """Of a text or a container; a number counts as that many characters, something else as 8."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else _ITEM
