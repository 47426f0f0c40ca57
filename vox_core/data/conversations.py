"""ShareGPT's conversations as messages, and preference pairs.

    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}

`from` becomes `role`, `value` becomes `content`, and whatever else a turn has stays. A list whose
turns have `role` and `content` already is left as it is. A `system` beside the conversation is its
first message.

Preference pairs: an answer that was chosen, and one that was rejected.

    {"prompt": "…", "chosen": "…", "rejected": "…"}
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}

Lists may be whole conversations, which begin alike, or the answers alone, with the prompt (a text
or a list of messages) in a field of its own. Both end with an answer, and differ. What comes of a
row is the whole conversation up to the chosen answer, and the whole one up to the rejected one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from vox_core.data.faults import Location, RowError, RowFault
from vox_core.data.fields import PAIR, PROMPTS, QUESTION, Fields, text_of
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


Turns: TypeAlias = tuple[Message, ...]


def read_preference(fields: Fields) -> tuple[Turns, Turns]:
    """The conversation with the chosen answer, and the one with the rejected answer.

    Raises:
        RowError: with everything that is wrong with them.
    """
    values = {name: fields.take(name) for name in PAIR}
    missing = [name for name in PAIR if values[name] is None]
    if missing:
        other = next(name for name in PAIR if name not in missing[:1])
        found = f'"{other}" without "{missing[0]}"'
        raise RowError(RowFault("preference pair", (), found, "both"))
    both = [values[name] for name in PAIR]
    if all(isinstance(value, str) for value in both):
        chosen, rejected = _of_texts(fields, values)
    elif all(isinstance(value, list) for value in both):
        chosen, rejected = _of_lists(fields, values)
    else:
        shown = " and ".join(f'{json_type(values[name])} as "{name}"' for name in PAIR)
        raise RowError(RowFault("wrong type", (), shown, "two strings or two lists of messages"))
    if chosen == rejected:
        found = 'the same as "chosen" and as "rejected"'
        raise RowError(RowFault("preference pair", (), found, "two answers"))
    return chosen, rejected


def prompt_of(fields: Fields) -> tuple[str, str]:
    """The name of the prompt, and the prompt with the input that an instruction may have.

    Raises:
        RowError: there is none, or it is no text.
    """
    name = fields.one((*PROMPTS, QUESTION[0]))
    prompt = text_of(name, fields.values[name])
    if name == "instruction" and (extra := fields.take("input")) not in (None, ""):
        prompt = f"{prompt}\n\n{text_of('input', extra)}"
    return name, prompt


def _of_texts(fields: Fields, values: dict[str, object]) -> tuple[Turns, Turns]:
    _, prompt = prompt_of(fields)
    asked = Message("user", prompt)
    chosen, rejected = (Message("assistant", text_of(name, values[name])) for name in PAIR)
    return (asked, chosen), (asked, rejected)


def _of_lists(fields: Fields, values: dict[str, object]) -> tuple[Turns, Turns]:
    name, before = _before(fields, values)
    found, faults = [], list[RowFault]()
    for field in PAIR:
        try:
            found.append(_conversation(field, values[field], name, before))
        except RowError as fault:
            faults += fault.faults
    if faults:
        raise RowError(*faults)
    chosen, rejected = found
    if chosen[0] != rejected[0]:
        same = '"chosen" and "rejected" that begin differently'
        raise RowError(RowFault("preference pair", (), same, "one prompt"))
    return chosen, rejected


def _before(fields: Fields, values: dict[str, object]) -> tuple[str, list[object]]:
    """The messages of a prompt in a field of its own; a text that the lists repeat counts once."""
    prompts = (*PROMPTS, QUESTION[0])
    name = next((each for each in prompts if fields.values.get(each) is not None), "")
    prompt = fields.values.get(name)
    if isinstance(prompt, list):
        fields.first(prompts)
        return name, prompt
    lists = [value for value in values.values() if isinstance(value, list)]
    if not name or any(_asks(value) for value in lists):
        if any(prompt in _said(value) for value in lists):
            fields.used.add(name)
        return name, []
    return name, [{"role": "user", "content": prompt_of(fields)[1]}]


def _conversation(field: str, value: object, name: str, before: list[object]) -> Turns:
    sharegpt = is_sharegpt(value)
    said = as_messages(value, field)
    assert isinstance(said, list)
    parts = [(field, len(said), sharegpt)]
    messages = renamed([*before, *said], [(name, len(before), False), *parts] if before else parts)
    if messages[-1].role != "assistant":
        last = f'a "{field}" that ends with the {messages[-1].role}'
        raise RowError(RowFault("roles", (), last, "the assistant"))
    return messages


def _asks(value: list[object]) -> bool:
    """Whether a list has more than answers in it."""
    return any(
        isinstance(turn, dict)
        and (
            turn.get("role") in ("user", "system")
            or turn.get("from") in ("human", "user", "system")
        )
        for turn in value
    )


def _said(value: list[object]) -> list[object]:
    return [turn.get("content", turn.get("value")) for turn in value if isinstance(turn, dict)]
