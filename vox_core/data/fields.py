"""The fields of a row: names that mean the same, misspelt ones, unused ones, and its attributes.

A canonical name wins over its aliases. Where both are there and say the same, nothing is lost;
where they differ, the alias counts as unused. A field that is null is not there, unless nothing
else is.

Attributes describe a row: rating, category, difficulty, lane, response mode, family and tags.

    {"prompt": "…", "response": "…", "rating": 4.5, "category": "sql", "difficulty": "hard"}

An empty attribute counts as missing. One of the wrong type is a fault: rows are chosen by these
fields, and one that is passed over would be chosen wrongly.

`--field` and `[data.fields]` name the column or path of a row that holds each field.

    [data.fields]                       --field prompt=title
    prompt = "title"                    --field completion=answers.0.text
    completion = "answers.0.text"       --field text=
    text = ""

A path goes down into objects by name and into lists by number; a field that is called "a.b" is
found before the b of an a. Fields that are named here take the place of those that the row has
under the same name, and are not looked for under their old one. An empty path leaves a field out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any, NoReturn, TypeAlias

import numpy as np

from vox_core.data.faults import all_of, faulty, json_type, typed

WORDS = ("category", "lane", "response_mode", "task_family")
ATTRIBUTES = (*WORDS, "rating", "difficulty", "tags")


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes of a row that filters and curricula use."""

    rating: float | None = None
    category: str | None = None
    difficulty: float | str | None = None
    lane: str | None = None
    response_mode: str | None = None
    task_family: str | None = None
    tags: tuple[str, ...] = ()


NO_ATTRIBUTES = Attributes()


def attributes_of(values: Mapping[str, object]) -> Attributes:
    """Return the attributes of a row; the error has every one of the wrong type."""
    names = [name for name in ATTRIBUTES if values.get(name) is not None]
    if not names:
        return NO_ATTRIBUTES
    found = all_of(*(partial(_attribute, name, values[name]) for name in names))
    return Attributes(**dict(zip(names, found, strict=True)))


def _attribute(name: str, value: object) -> Any:
    at = (name,)
    if name == "tags":
        tags = typed(value, list, at, "a list of strings")
        return tuple(typed(tag, str, (*at, index)) for index, tag in enumerate(tags))
    if name in WORDS or (name == "difficulty" and isinstance(value, str)):
        return typed(value, str, at) or None
    if isinstance(value, bool) or not isinstance(value, int | float):
        expected = "a number" if name == "rating" else "a number or a word"
        raise faulty("wrong type", at, json_type(value), expected)
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise faulty("wrong value", at, "a number too large", "a finite one")
    return number


LEVELS = {
    "beginner": 1.0,
    "easy": 1.0,
    "intermediate": 2.0,
    "medium": 2.0,
    "advanced": 3.0,
    "hard": 3.0,
    "expert": 4.0,
}
UNKNOWN = math.nan


def level(said: float | str | None) -> float:
    """The number; `UNKNOWN` for what says nothing."""
    if said is None:
        return UNKNOWN
    if isinstance(said, str):
        try:
            said = LEVELS.get(said.strip().lower()) or float(said)
        except ValueError:
            return UNKNOWN
    return float(np.float32(said)) if math.isfinite(said) and abs(said) < 1e30 else UNKNOWN


# --- names ----------------------------------------------------------------------------------------

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

_EXPECTED = (
    "one of messages, conversations, prompt, instruction, question, completion, response, output, "
    "answer, text, chosen"
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
        return any(self.values.get(name) is not None for name in names)

    def first(self, names: Sequence[str]) -> str | None:
        """Of names that stand for the same, the one that counts: the first that is there."""
        there = [name for name in names if name in self.values]
        if not there:
            return None
        name = next((each for each in there if self.values[each] is not None), there[0])
        self.used |= {each for each in there if self.values[each] in (None, self.values[name])}
        return name

    def one(self, names: Sequence[str]) -> str:
        """Return the same where one has to be there."""
        if name := self.first(names):
            return name
        near = "; ".join(_hint(name) for name in self.values if _meant(name) in names)
        expected = f"one ({near})" if near else "one"
        raise faulty("unknown form", (), f"none of {', '.join(names)}", expected)

    def take(self, name: str) -> object:
        """A value; None if there is none."""
        self.used.add(name)
        return self.values.get(name)

    def unused(self) -> tuple[str, ...]:
        """Names that no form has used, in the order of the row; a misspelt one is a fault. Not
        those of a form that the row does not have, where a table has columns for all of them."""
        known = {*self.used, *ATTRIBUTES, PROVENANCE}
        known.update(name for name in CONTENT if self.values.get(name) is None)
        names = tuple(name for name in self.values if name not in known)
        refuse_misspelt(names)
        return names


def refuse_unknown(names: Sequence[str]) -> NoReturn:
    """A row without a field that makes it one of some form."""
    if not names:
        raise faulty("empty", (), "an object without fields", _EXPECTED)
    hints = "; ".join(_hint(name) for name in names if _meant(name))
    found = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    expected = f"{_EXPECTED} ({hints})" if hints else _EXPECTED
    raise faulty("unknown form", (), f"the fields {found}", expected)


def refuse_misspelt(names: Sequence[str]) -> None:
    """Refuse unused fields that are all but one of those that are trained (RowError)."""
    all_of(*(partial(_refuse_misspelt, name) for name in names if name not in KNOWN))


def _refuse_misspelt(name: str) -> None:
    if nearest := _nearest(name, 0.85):
        expected = f'a known one (is it meant as "{nearest}"?)'
        raise faulty("misspelt field", (), f'the field "{name}"', expected)


@lru_cache(1024)
def _nearest(name: str, cutoff: float = 0.6) -> str | None:
    return next(iter(get_close_matches(name, _OFTEN_MISSPELT, n=1, cutoff=cutoff)), None)


def _meant(name: str) -> str | None:
    """Return the field that an unknown name may stand for; None if there is no near one."""
    if name in (*CONTENT, *QUESTION):
        return None
    return _ELSEWHERE_CALLED.get(name) or _nearest(name)


def _hint(name: str) -> str:
    return f'is "{name}" meant as "{_meant(name)}"?'


# --- [data.fields] --------------------------------------------------------------------------------

FieldMap: TypeAlias = Mapping[str, str]
NO_FIELDS: FieldMap = {}
_MISSING = object()


def mapped(values: dict[str, object], fields: FieldMap) -> dict[str, object]:
    """Return a row with its fields where vox looks for them; it must have a field that is named."""
    wanted = {name: path for name, path in fields.items() if path}
    found = {name: _find(values, path) for name, path in wanted.items()}
    there = {name: value for name, value in found.items() if value is not _MISSING}
    if wanted and not there:
        shown = ", ".join(list(values)[:10]) or "none"
        expected = f"one that --field names ({', '.join(wanted.values())})"
        raise faulty("unknown form", (), f"the fields {shown}", expected)
    paths = [wanted[name] for name in there]
    moved = {path if path in values else path.partition(".")[0] for path in paths}
    return {**there, **{k: v for k, v in values.items() if k not in moved and k not in fields}}


def _find(values: dict[str, object], path: str) -> object:
    if path in values:
        return values[path]
    value: object = values
    for part in path.split("."):
        if isinstance(value, dict):
            value = value.get(part, _MISSING)
        elif isinstance(value, list) and part.isascii() and part.isdigit():
            value = value[int(part)] if len(part) < 10 and int(part) < len(value) else _MISSING
        else:
            return _MISSING
    return value
