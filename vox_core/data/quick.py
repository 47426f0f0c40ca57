"""The usual row, read quickly, and with the same result as the slow way to the last bit.

`json` with a look at each pair of every object takes most of the time that looking at a file takes.
orjson is five times as quick, and says nothing of a key that stands twice. That there is none is
proven by counting: outside of texts, a quotation mark and a colon follow one another at the end of
each key and nowhere else, so no more of them in the line than there are keys in the value means
that none was lost. Whatever makes the count uncertain (white space before a colon, a backslash
before the quotation mark), whatever is no usual row, and whatever is wrong goes the slow way, which
finds the words for it. orjson rounds integers of more than 64 bits, as a rating is anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import orjson

from vox_core.data.attributes import ATTRIBUTES, WORDS, attributes_of
from vox_core.data.fields import ANSWERS, KNOWN, PROMPTS, PROVENANCE, misspelt
from vox_core.data.jsonl import parse_object
from vox_core.data.messages import Message
from vox_core.data.rows import Row, form_of_completion, parse_row

_loads = orjson.loads
# As numbers, which are looked for ten times as fast as texts.
_TAB, _RETURN, _BACKSLASH = b"\t\r\\"
_NONE = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(WORDS, (str, _NONE)),
    "rating": (float, int, _NONE),
    "difficulty": (str, float, int, _NONE),
    "tags": (list, _NONE),
}
_MAX_DEPTH = 16

Group: TypeAlias = Literal["messages", "completion", "text"]


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What the names of a usual row's fields say. One object for all rows of the same names, for as
    long as these are not forgotten (`_shape`): it is counted by.

    Args:
        names: fields that have to be there as texts (or, for messages, as a list).
        input: whether an instruction has an input.
        attributes: names of the fields that say something of the row itself.
        unused: names of the other fields, of which somebody is told.
        others: the same and those that nobody needs to be told of; their values may have keys.
        alone: there are no fields but `names`.
    """

    group: Group
    form: str
    names: tuple[str, ...]
    input: bool
    attributes: tuple[str, ...]
    unused: tuple[str, ...]
    others: tuple[str, ...]
    alone: bool


Usual: TypeAlias = tuple[dict[str, Any], Shape]


def read_row(line: bytes | None) -> Row:
    """The row that a line holds.

    Raises:
        RowError: with everything that is wrong with it.
    """
    if line is not None and (usual := usual_row(line)):
        return _row(*usual)
    return parse_row(parse_object(line))


def usual_row(line: bytes) -> Usual | None:
    """The fields of a line whose row is a usual one with nothing wrong; None where that is not
    certain."""
    try:
        values = _loads(line)
    except ValueError:
        return None
    if type(values) is not dict or line.find(b" :") >= 0:
        return None
    if (_TAB in line and b"\t:" in line) or (_RETURN in line and b"\r:" in line):
        return None
    shape = _shape(tuple(values))
    if shape is None:
        return None
    keys, ends = _keys_of(values, shape), line.count(b'":')
    if _BACKSLASH in line:
        if b'\\\\":' in line:
            return None
        ends -= line.count(b'\\":')
    if ends != keys:
        return None
    if shape.attributes and not _usual_attributes(values, shape.attributes):
        return None
    return values, shape


def _usual_attributes(values: dict[str, Any], names: tuple[str, ...]) -> bool:
    """Whether what a row says of itself is of the right types; orjson gives finite numbers only."""
    for name in names:
        value = values[name]
        if type(value) not in _TYPES[name]:
            return False
        if type(value) is list and not all(type(tag) is str for tag in value):
            return False
    return True


def _keys_of(values: dict[str, Any], shape: Shape) -> int | None:
    """How many keys there are in a row of this shape; None if something is wrong with it."""
    keys = len(values)
    if shape.group == "messages":
        messages = values["messages"]
        if type(messages) is not list or not _usual_messages(messages):
            return None
        keys += 2 * len(messages)
    elif not _usual_texts(values, shape):
        return None
    if shape.alone:
        return keys
    for name in shape.others:
        value = values[name]
        if type(value) is dict or type(value) is list:
            if (within := _keys_within(value, _MAX_DEPTH)) is None:
                return None
            keys += within
    return keys


def _usual_texts(values: dict[str, Any], shape: Shape) -> bool:
    """Texts that say something; only an input may be empty."""
    for name in shape.names:
        value = values[name]
        if type(value) is not str or not value or value.isspace():
            return False
    if not shape.input:
        return True
    extra = values["input"]
    return type(extra) is str and not extra.isspace()


def _usual_messages(messages: list[Any]) -> bool:
    """System first or not at all, then users and assistants, all of whom say something."""
    answered, first = False, True
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return False
        role, content = message.get("role"), message.get("content")
        if type(content) is not str or not content or content.isspace():
            return False
        if role == "assistant":
            answered = True
        elif role != "user" and not (first and role == "system"):
            return False
        first = False
    return answered


def _keys_within(value: Any, depth: int) -> int | None:
    if not depth:
        return None
    children, keys = (value.values(), len(value)) if type(value) is dict else (value, 0)
    for child in children:
        if type(child) is dict or type(child) is list:
            if (within := _keys_within(child, depth - 1)) is None:
                return None
            keys += within
    return keys


@lru_cache(4096)
def _shape(names: tuple[str, ...]) -> Shape | None:
    """What a row with fields of these names is, if it can be a usual one."""
    known = {name for name in names if name in KNOWN}
    attributes = known.intersection(ATTRIBUTES)
    content = known - attributes
    others = tuple(name for name in names if name not in known)
    unused = tuple(name for name in others if name != PROVENANCE)
    if any(map(misspelt, unused)) or "documents" in unused:
        return None
    found = _named(content - {"input"} if "instruction" in content else content)
    if found is None:
        return None
    group, used = found
    form = form_of_completion(*used) if group == "completion" else group
    alone = len(names) == len(used)
    named = tuple(attributes)
    return Shape(group, form, used, "input" in content, named, unused, others, alone)


def _named(content: set[str]) -> tuple[Group, tuple[str, ...]] | None:
    if content == {"messages"}:
        return "messages", ("messages",)
    if content == {"text"}:
        return "text", ("text",)
    for prompt in PROMPTS:
        for answer in ANSWERS:
            if content == {prompt, answer}:
                return "completion", (prompt, answer)
    return None


def _row(values: dict[str, Any], shape: Shape) -> Row:
    if shape.group == "messages":
        messages = tuple(Message(each["role"], each["content"]) for each in values["messages"])
        if shape.alone:
            return Row("chat", messages, form="messages")
        return Row("chat", messages, "", shape.unused, (), (), attributes_of(values), shape.form)
    if shape.group == "text":
        text, attributes = values["text"], attributes_of(values)
        return Row("text", (), text, shape.unused, (), (), attributes, shape.form)
    prompt, answer = (values[name] for name in shape.names)
    if shape.input and values["input"]:
        prompt = f"{prompt}\n\n{values['input']}"
    messages = Message("user", prompt), Message("assistant", answer)
    attributes = attributes_of(values)
    return Row("completion", messages, "", shape.unused, (), (), attributes, shape.form)
