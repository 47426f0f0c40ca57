"""ShareGPT's conversations as messages.

    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}

`from` becomes `role`, `value` becomes `content`, and whatever else a turn has stays. A list whose
turns have `role` and `content` already is left as it is. A `system` beside the conversation is its
first message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vox_core.data.faults import Location, RowError, RowFault
from vox_core.data.fields import Fields, text_of
from vox_core.data.jsonl import json_type
from vox_core.data.messages import Message, conversation

NAME = "conversations"
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_INNER = {"content": "value", "role": "from"}


def is_sharegpt(value: object) -> bool:
    """Whether turns say `from` and not `role`."""
    return isinstance(value, list) and any(
        isinstance(turn, dict) and "from" in turn and "role" not in turn for turn in value
    )


def read_sharegpt(fields: Fields) -> tuple[Message, ...]:
    """The conversation of a row.

    Raises:
        RowError: with everything that is wrong with it.
    """
    value = as_messages(fields.take(NAME), NAME)
    if fields.has(("system",)):
        said = text_of("system", fields.take("system"))
        if isinstance(value, list) and value[:1] != [{"role": "system", "content": said}]:
            value = [{"role": "system", "content": said}, *value]
            return renamed(value, [("system", 1, False), (NAME, len(value), True)])
    return renamed(value, [(NAME, len(value) if isinstance(value, list) else 0, True)])


def as_messages(value: object, name: str) -> object:
    """`value` with `from` and `value` as `role` and `content`, if it is written so.

    Raises:
        RowError: somebody speaks whom nobody knows.
    """
    if not is_sharegpt(value):
        return value
    assert isinstance(value, list)
    if faults := [fault for i, turn in enumerate(value) if (fault := _stranger(turn, name, i))]:
        raise RowError(*faults)
    return [_message(turn) for turn in value]


def _stranger(turn: object, name: str, index: int) -> RowFault | None:
    if not isinstance(turn, dict):
        return RowFault("wrong type", (name, index), json_type(turn), "an object")
    who = turn.get("from")
    if isinstance(who, str) and who in SPEAKERS:
        return None
    shown = f'"{who}"' if isinstance(who, str) else json_type(who)
    return RowFault("roles", (name, index, "from"), shown, f"one of {', '.join(SPEAKERS)}")


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": SPEAKERS[turn["from"]], "content": turn.get("value"), **rest}


def renamed(value: object, parts: list[tuple[str, int, bool]]) -> tuple[Message, ...]:
    """`conversation(value)`, with faults at the places of the row.

    Args:
        parts: name in the row, number of messages from there, and whether they are ShareGPT's.

    Raises:
        RowError: with everything that is wrong with it.
    """
    try:
        return conversation(value)
    except RowError as error:
        faults = error.faults
    raise RowError(*(replace(each, location=_place(each.location, parts)) for each in faults))


def _place(location: Location, parts: list[tuple[str, int, bool]]) -> Location:
    """A location in the messages as one in the row."""
    if not location:
        return ()
    name, sharegpt = parts[-1][0], parts[-1][2]
    if len(location) == 1:
        return (name,)
    _, index, *inner = location
    assert isinstance(index, int)
    for part, number, its in parts:
        if index < number or part == parts[-1][0]:
            name, sharegpt = part, its
            break
        index -= number
    if len(parts) > 1 and (name, 1, False) == parts[0]:
        return (name,)
    if sharegpt:
        inner = [_INNER.get(str(each), each) for each in inner]
    return (name, index, *inner)
