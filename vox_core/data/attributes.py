"""What a row says of itself: its rating, category, difficulty, lane, response mode, family and
tags.

    {"prompt": "…", "response": "…", "rating": 4.5, "category": "sql", "difficulty": "hard"}

A field that is null, or an empty text, says nothing. One of the wrong type is a fault: rows are
chosen by these fields, and one that is passed over would be chosen wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vox_core.data.faults import RowError, RowFault
from vox_core.data.jsonl import json_type

WORDS = ("category", "lane", "response_mode", "task_family")
ATTRIBUTES = ("rating", "category", "difficulty", "lane", "response_mode", "task_family", "tags")


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a row says of itself, for those who choose among rows."""

    rating: float | None = None
    category: str | None = None
    difficulty: float | str | None = None
    lane: str | None = None
    response_mode: str | None = None
    task_family: str | None = None
    tags: tuple[str, ...] = ()


NO_ATTRIBUTES = Attributes()
_NAMES = frozenset(ATTRIBUTES)


def attributes_of(fields: Mapping[str, object]) -> Attributes:
    """Read them.

    Raises:
        RowError: with every one that has the wrong type.
    """
    if _NAMES.isdisjoint(fields):
        return NO_ATTRIBUTES
    faults: list[RowFault] = []
    words = {name: _word(name, fields.get(name), faults) for name in WORDS}
    rating = _number("rating", fields.get("rating"), "a number", faults)
    difficulty = _difficulty(fields.get("difficulty"), faults)
    tags = _tags(fields.get("tags"), faults)
    if faults:
        raise RowError(*faults)
    return Attributes(rating=rating, difficulty=difficulty, tags=tags, **words)


def _word(name: str, value: object, faults: list[RowFault]) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    faults.append(RowFault("wrong type", (name,), json_type(value), "a string"))
    return None


def _difficulty(value: object, faults: list[RowFault]) -> float | str | None:
    if isinstance(value, str):
        return value or None
    return _number("difficulty", value, "a number or a word", faults)


def _number(name: str, value: object, expected: str, faults: list[RowFault]) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if (number := _float(value)) is not None:
            return number
        faults.append(RowFault("wrong value", (name,), "a number too large", "a finite one"))
    else:
        faults.append(RowFault("wrong type", (name,), json_type(value), expected))
    return None


def _float(value: float) -> float | None:
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _tags(value: object, faults: list[RowFault]) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, list) and all(isinstance(tag, str) for tag in value):
        return tuple(value)
    found = json_type(value)
    if isinstance(value, list):
        found = f"{next(json_type(tag) for tag in value if not isinstance(tag, str))} within a list"
    faults.append(RowFault("wrong type", ("tags",), found, "a list of strings"))
    return ()
