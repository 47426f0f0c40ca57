"""The fields of a row: names that mean the same, misspelt ones, unused ones, and its attributes.

A canonical name wins over its aliases. Where both are there and say the same, nothing is lost;
where they differ, the alias counts as unused. A field that is null is not there, unless nothing
else is.

Attributes describe a row: rating, category, difficulty, lane, response mode, family and tags.

    {"prompt": "…", "response": "…", "rating": 4.5, "category": "sql", "difficulty": "hard"}

An empty attribute counts as missing. One of the wrong type is a fault: rows are chosen by these
fields, and one that is passed over would be chosen wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import NoReturn

from vox_core.data.faults import RowError, RowFault
from vox_core.data.jsonl import json_type
from vox_core.data.messages import refuse_surrogates

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


CHATS = ("messages", "turns")
SHAREGPT = ("conversations",)
PROMPTS = ("prompt", "instruction")
ANSWERS = ("completion", "response", "output")
QUESTION = ("question", "answer")
"""A prompt and a completion, of rows that are of no other form: chats and texts often have these
beside them."""
TEXTS = ("text",)
PAIR = ("chosen", "rejected")
TOOLS = ("tools", "functions")
CONTENT = (*CHATS, *SHAREGPT, *PROMPTS, *ANSWERS, *TEXTS, *PAIR)
"""Fields that make a row one of some form; the rest goes with them."""
KNOWN = (*CONTENT, *QUESTION, "input", "system", *TOOLS, *ATTRIBUTES)
PROVENANCE = "provenance"
"""Where a row comes from, as `vox data extract` writes it; of no use here, and no surprise."""

_SAY_OF_THE_ROW = frozenset(ATTRIBUTES)
_EXPECTED = (
    "messages, conversations, prompt, instruction, question, completion, response, output, answer, "
    "text, chosen"
)
_OFTEN_MISSPELT = ("messages", *PROMPTS, *ANSWERS, *TEXTS, *PAIR)
_ELSEWHERE_CALLED = {
    "conversation": "messages",
    "dialogue": "messages",
    "input": "prompt",
    "query": "prompt",
    "content": "text",
}


class Fields:
    """A row's fields, and which of them have been used."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values
        self.used: set[str] = set()

    def has(self, names: Sequence[str]) -> bool:
        """Whether one of `names` is there and not null."""
        get = self.values.get
        for name in names:  # noqa: SIM110  # half the time of any(...), for every row
            if get(name) is not None:
                return True
        return False

    def first(self, names: Sequence[str]) -> str | None:
        """Of names that stand for the same, the one that counts: the first that is there."""
        there = [name for name in names if name in self.values]
        said = [name for name in there if self.values[name] is not None]
        if not there:
            return None
        name = (said or there)[0]
        value = self.values[name]
        self.used |= {each for each in there if self.values[each] in (None, value)}
        return name

    def one(self, names: Sequence[str]) -> str:
        """The same, where one has to be there.

        Raises:
            RowError: there is none.
        """
        if name := self.first(names):
            return name
        near = "; ".join(_hint(name) for name in self.values if _meant(name) in names)
        expected = f"one ({near})" if near else "one"
        raise RowError(RowFault("unknown form", (), f"none of {', '.join(names)}", expected))

    def take(self, name: str) -> object:
        """A value; None if there is none."""
        self.used.add(name)
        return self.values.get(name)

    def unused(self) -> tuple[str, ...]:
        """Names that nobody has asked for, in the order of the row; not those of a form that the
        row does not have, where a table has columns for all of them."""
        values, used = self.values, self.used
        return tuple(
            name
            for name in values
            if name not in used and name not in _SAY_OF_THE_ROW and name != PROVENANCE
            if not (values[name] is None and name in CONTENT)
        )


def text_of(name: str, value: object) -> str:
    """A text that says something.

    Raises:
        RowError: it is none.
    """
    if not isinstance(value, str):
        raise RowError(RowFault("wrong type", (name,), json_type(value), "a string"))
    refuse_surrogates((name,), value)
    if not value.strip():
        raise RowError(RowFault("empty", (name,), "nothing", "text"))
    return value


def refuse_unknown(names: Sequence[str]) -> NoReturn:
    """A row without a field that makes it one of some form."""
    if not names:
        raise RowError(RowFault("empty", (), "an object without fields", f"one of {_EXPECTED}"))
    hints = [_hint(name) for name in names if _meant(name)]
    nearest = f" ({'; '.join(hints)})" if hints else ""
    shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    expected = f"one of {_EXPECTED}{nearest}"
    raise RowError(RowFault("unknown form", (), f"the fields {shown}", expected))


@lru_cache(1024)
def misspelt(name: str) -> RowFault | None:
    """The fault of an unused field that is all but one of those that are trained."""
    if name in KNOWN:
        return None
    nearest = get_close_matches(name, _OFTEN_MISSPELT, n=1, cutoff=0.85)
    if not nearest:
        return None
    expected = f'a known one (is it meant as "{nearest[0]}"?)'
    return RowFault("misspelt field", (), f'the field "{name}"', expected)


@lru_cache(1024)
def _meant(name: str) -> str | None:
    """What an unknown field may be meant as, where one is missing."""
    if name in (*CONTENT, *QUESTION):
        return None
    nearest = get_close_matches(name, _OFTEN_MISSPELT, n=1)
    return _ELSEWHERE_CALLED.get(name) or next(iter(nearest), None)


def _hint(name: str) -> str:
    return f'is "{name}" meant as "{_meant(name)}"?'
