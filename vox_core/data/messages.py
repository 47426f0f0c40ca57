"""Conversations: a row's list of messages, each fault found where it stands.

Roles: system or developer may only come first, a tool answers an assistant or another tool, and
someone must be the assistant. Two turns of one role in a row are let through here, because many
chat templates take them; one that does not refuses the row when it is rendered, with the template's
own words.

Content is a string, or a list of text parts, which are joined. Blank content is a fault, except
for system, developer and tool (an empty system prompt is how a template's default is turned off,
and a tool may return nothing), and for an assistant that calls tools.

A message may say more: an assistant's `tool_calls` (or `function_call`, their old form) and
`reasoning_content` (or `reasoning`, `thinking`), a tool's `tool_call_id`, anyone's `name`; and
`weight` or `train`, which say how much of it is trained. Only what an assistant says is trained,
unless `train` is true: a `weight` alone on somebody else is a fault, as it may mean either.
Other fields are not used.

ShareGPT's turns have `from` in place of `role` and `value` in place of `content`. The value of a
`function_call` is a call as JSON text.

Functions that an assistant may call, and its calls, have the form that OpenAI gave them:

    {"type": "function", "function": {"name": "add", "description": "…", "parameters": {…}}}
    {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}

`arguments` is an object or an object written as JSON text, and is an object from here on: that is
what transformers hands to a chat template (the few that want the text get it,
`template.py`). A function or a call without the outer object is given one. Other fields of
a call are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from vox_core.data.faults import (
    Location,
    RowError,
    RowFault,
    all_of,
    faulty,
    json_type,
    text_of,
    typed,
)
from vox_core.data.json_rows import parse_value
from vox_core.errors import DataError

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]

ROLES: dict[str, Role] = {role: role for role in get_args(Role)}
SPEAKERS: dict[str, Role] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
_FIRST_ONLY = ("system", "developer")
_MAY_BE_BLANK = ("system", "developer", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_SPOKEN_BY: dict[str, Role] = {
    **dict.fromkeys(("tool_calls", "function_call", *_REASONING), "assistant"),
    "tool_call_id": "tool",
}


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation.

    Args:
        extra: what else the chat template is given of it: tool_calls (with arguments as objects),
            tool_call_id, name, reasoning_content.
        weight: of what it says, as something to be trained, from 0 to 1; None leaves it to the
            role: 1 for the assistant, 0 for others.
    """

    role: Role
    content: str
    extra: Mapping[str, Any] | None = None
    weight: float | None = None


class Turn(NamedTuple):
    """A message as it stands in a row.

    Args:
        sharegpt: it has `from` and `value`.
    """

    place: Location
    value: object
    sharegpt: bool = False


def turns_of(value: object, name: str) -> list[Turn]:
    """Return the turns in a field of a row, which must be a list."""
    items = typed(value, list, (name,))
    sharegpt = any(isinstance(it, dict) and "from" in it and "role" not in it for it in items)
    return [Turn((name, index), item, sharegpt) for index, item in enumerate(items)]


def conversation(turns: Sequence[Turn], *, answered: bool = True) -> tuple[Message, ...]:
    """Read the messages of a row.

    Args:
        answered: require an assistant's message.

    Raises:
        RowError: with every fault of the messages or, if there is none, of their order.
    """
    messages = all_of(*(partial(_message, turn, answered) for turn in turns))
    faults = list(_order_faults([turn.place for turn in turns], messages))
    if answered and "assistant" not in (roles := [message.role for message in messages]):
        found = f"no assistant message (roles: {', '.join(roles) or 'none'})"
        faults.append(RowFault("roles", (), found, "at least one"))
    if faults:
        raise RowError(*faults)
    return tuple(messages)


def answerable(messages: object) -> list[dict[str, Any]]:
    """Return messages in the form for chat templates; D003 if nobody could answer them."""
    if isinstance(messages, Iterable) and not isinstance(messages, Mapping):
        messages = list(messages)
    try:
        if not (found := conversation(turns_of(messages, "messages"), answered=False)):
            raise faulty("empty", ("messages",), "no message", "one or more")
    except RowError as error:
        what, remedy = "this is no conversation", "give a list of messages with role and content"
        raise DataError("D003", what, faults=[*map(str, error.faults)], remedy=remedy) from error
    return [{"role": it.role, "content": it.content, **(it.extra or {})} for it in found]


def _message(turn: Turn, answered: bool = True) -> Message:
    place = turn.place
    item = typed(turn.value, dict, place)
    role_key, content_key = ("from", "value") if turn.sharegpt else ("role", "content")
    role = _role(item.get(role_key), (*place, role_key), SPEAKERS if turn.sharegpt else ROLES)
    if turn.sharegpt and item["from"] == "function_call":  # LLaMA-Factory's
        calls = [_arguments(item.get("value"), (*place, "value"))]
        item = {**item, "value": None, "tool_calls": calls}
    content = item.get(content_key, item.get("content"))
    if len(item) == 2 and isinstance(content, str) and content.isascii() and content.strip():
        return Message(role, content)  # the usual case, which none of the rest can object to
    extra = _extra(item, role, place)
    weight = _weight(item, role, place)
    if content is None and "tool_calls" in extra:
        return Message(role, "", extra, weight)
    at = (*place, content_key)
    if isinstance(content, list):
        content = "".join(_part(part, (*at, index)) for index, part in enumerate(content))
    silent = role == "assistant" and not answered  # a model may have said nothing
    may_be_blank = silent or role in _MAY_BE_BLANK or "tool_calls" in extra
    text = text_of(content, at, "" if may_be_blank else f"text of the {role}")
    return Message(role, text, extra or None, weight)


def _role(found: object, place: Location, roles: Mapping[str, Role]) -> Role:
    if found == "function":  # what a tool was called before there were others
        return "tool"
    if isinstance(found, str) and found in roles:
        return roles[found]
    shown = f'"{found}"' if isinstance(found, str) else json_type(found)
    raise faulty("roles", place, shown, f"one of {', '.join(roles)}")


def _extra(item: dict[str, object], role: Role, place: Location) -> dict[str, Any]:
    """Return the fields for the chat template besides role and content."""
    said = {key: value for key, value in item.items() if value is not None and value != []}
    for name, speaker in _SPOKEN_BY.items():
        if name in said and role != speaker:
            raise faulty("roles", place, f"{name} of the {role}", f"it of the {speaker}")
    extra: dict[str, Any] = {}
    if {"function_call", "tool_calls"} <= said.keys():
        raise faulty("several forms", place, "tool_calls and function_call", "one of them")
    if "function_call" in said:
        extra["tool_calls"] = [tool_call(said["function_call"], (*place, "function_call"))]
    elif calls := tool_calls(said.get("tool_calls"), (*place, "tool_calls")):
        extra["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if name in said:
            extra[name] = text_of(said[name], (*place, name), "")
    texts = {name: text_of(said[name], (*place, name), "") for name in _REASONING if name in said}
    different = {text: name for name, text in texts.items() if text.strip()}
    if len(different) > 1:
        names = " and ".join(different.values())
        raise faulty("several forms", place, f"different {names}", "one of them")
    if different:
        extra["reasoning_content"] = next(iter(different))
    return extra


def _weight(item: dict[str, object], role: Role, place: Location) -> float | None:
    weight, train = item.get("weight"), item.get("train")
    if train is not None:
        typed(train, bool, (*place, "train"), "true or false")
    if weight is None:
        return None if train is None else float(bool(train))
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        found = str(weight) if json_type(weight) == "a number" else json_type(weight)
        raise faulty("wrong value", (*place, "weight"), found, "a number from 0 to 1")
    if train is not None and train != (weight > 0):
        found = f'"train": {str(train).lower()} with the weight {weight}'
        raise faulty("wrong value", place, found, "them to agree")
    if weight > 0 and role != "assistant" and not train:
        expected = '0, or "train": true beside it to train what the assistant does not say'
        raise faulty("wrong value", place, f"the weight {weight} of the {role}", expected)
    return float(weight)


def _part(part: object, place: Location) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        return typed(part.get("text"), str, (*place, "text"))
    kind = f'type "{part.get("type")}"' if isinstance(part, dict) else json_type(part)
    raise faulty("unsupported", place, f"a part of {kind}", "parts of type text only")


def _order_faults(places: Sequence[Location], messages: Sequence[Message]) -> Iterator[RowFault]:
    before, ids = "", set[str | None]({None})
    for at, message in zip(places, messages, strict=True):
        role, extra = message.role, message.extra or {}
        if role in _FIRST_ONLY and before:
            yield RowFault("roles", at, f'the role "{role}"', "it first or not at all")
        if role == "tool" and before not in ("assistant", "tool"):
            yield RowFault("roles", at, 'the role "tool"', "it after an assistant")
        if role == "assistant":
            ids = {call.get("id") for call in extra.get("tool_calls", ({},))}
        answered = extra.get("tool_call_id")
        if answered is not None and None not in ids and answered not in ids:
            found, known = f'the tool_call_id "{answered}"', ", ".join(sorted(filter(None, ids)))
            yield RowFault("wrong value", at, found, f"one of {known}")
        before = role


Call: TypeAlias = dict[str, Any]

_CALL_KEYS = ("name", "arguments")


def tool_schemas(value: object, name: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """The functions of a row, or a RowError with everything that is wrong with them.

    Args:
        value: a list of them, or one written as JSON text; null for none.
    """
    if isinstance(value, str):
        try:
            value = parse_value(value)
        except RowError:
            raise faulty("invalid JSON", (name,), "no JSON", "a list") from None
    return tuple(_each(value, (name,), _schema))


def tool_calls(value: object, place: Location) -> list[Call]:
    """Return the calls that an assistant makes in one message, or all faults of them."""
    return _each(value, place, tool_call)


def _each(value: object, place: Location, read: Callable[[object, Location], Call]) -> list[Call]:
    items = [] if value is None else typed(value, list, place)
    return all_of(*(partial(read, item, (*place, index)) for index, item in enumerate(items)))


def _schema(item: object, place: Location) -> dict[str, Any]:
    fields = typed(item, dict, place)
    schema = fields if "function" in fields else {"type": "function", "function": fields}
    _check(schema, place)
    return _writable(schema, place)


def tool_call(item: object, place: Location) -> Call:
    """Return one call; also a `function_call`, the form before `tool_calls`."""
    fields = typed(item, dict, place)
    if "function" not in fields:
        rest = {key: value for key, value in fields.items() if key not in _CALL_KEYS}
        function = {key: fields[key] for key in _CALL_KEYS if key in fields}
        fields = {"type": "function", **rest, "function": function}
    if (id := fields.get("id")) is not None:
        typed(id, str, (*place, "id"))
    _check(fields, place)
    function = fields["function"]
    arguments = _arguments(function.get("arguments"), (*place, "function", "arguments"))
    call = {**fields, "type": "function", "function": {**function, "arguments": arguments}}
    return _writable(call, place)


def _check(fields: dict[str, Any], place: Location) -> None:
    """Check what a schema and a call have in common."""
    if (kind := fields.get("type")) not in (None, "function"):
        found = f'"{kind}"' if isinstance(kind, str) else json_type(kind)
        raise faulty("wrong value", (*place, "type"), found, '"function"')
    name = typed(fields["function"], dict, (*place, "function")).get("name")
    if not isinstance(name, str) or not name.strip():
        found = "an empty string" if isinstance(name, str) else json_type(name)
        raise faulty("wrong value", (*place, "name"), found, "that of a function")


def _arguments(value: object, place: Location) -> dict[str, Any]:
    """Arguments of a call as an object; None and empty text stand for none."""
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        return typed(value, dict, place, "an object or JSON text of one")
    try:
        parsed = parse_value(value)
    except RowError as fault:
        inner = fault.faults[0]
        raise faulty(inner.code, place, inner.found, "a JSON object") from None
    return typed(parsed, dict, place, "a JSON object")


def _writable(value: dict[str, Any], place: Location) -> dict[str, Any]:
    """`value`, which JSON in UTF-8 can hold; a template could not be given it otherwise."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise faulty("half a character", place, "half a surrogate pair", "both or none") from None
    except RecursionError:
        raise faulty("wrong value", place, "an object nested too deeply", "less") from None
    return value
