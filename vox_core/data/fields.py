"""The names of a row's fields: which stand for the same, which are misspelt, which are not used.

A canonical name wins over its aliases. Where both are there and say the same, nothing is lost;
where they differ, the alias is among the unused fields, of which somebody is told. A field that is
null is not there, unless nothing else is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import NoReturn

from vox_core.data.attributes import ATTRIBUTES
from vox_core.data.faults import RowError, RowFault
from vox_core.data.jsonl import json_type
from vox_core.data.messages import refuse_surrogates

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
