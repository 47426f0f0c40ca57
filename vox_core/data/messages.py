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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from vox_core.data.faults import Location, RowError, RowFault
from vox_core.data.jsonl import json_type
from vox_core.data.tools import call_of_old, tool_calls

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]

ROLES: tuple[Role, ...] = get_args(Role)

_NAMED: dict[str, Role] = {role: role for role in ROLES}
_FIRST_ONLY = ("system", "developer")
_MAY_BE_BLANK = ("system", "developer", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_SPOKEN_BY: dict[str, Role] = {
    **dict.fromkeys(("tool_calls", "function_call", *_REASONING), "assistant"),
    "tool_call_id": "tool",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

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


def conversation(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise RowError(RowFault("wrong type", ("messages",), json_type(value), "a list"))
    messages: list[Message] = []
    faults: list[RowFault] = []
    for index, item in enumerate(value):
        try:
            messages.append(_message(item, ("messages", index)))
        except RowError as fault:
            faults += fault.faults
    if not faults:
        faults = list(_order_faults(messages))
    if faults:
        raise RowError(*faults)
    return tuple(messages)


def _message(item: object, place: Location) -> Message:
    if not isinstance(item, dict):
        raise RowError(RowFault("wrong type", place, json_type(item), "an object"))
    if usual := _usual_message(item):
        return usual
    role = _role(item, place)
    extra = _extra(item, role, place)
    weight = _weight(item, role, place)
    if (content := item.get("content")) is None and "tool_calls" in extra:
        return Message(role, "", extra, weight)
    content = _content(content, (*place, "content"))
    if not content.strip() and role not in _MAY_BE_BLANK and "tool_calls" not in extra:
        raise RowError(RowFault("empty", (*place, "content"), "nothing", f"text of the {role}"))
    return Message(role, content, extra or None, weight)


def _usual_message(item: dict[str, object]) -> Message | None:
    """A message of role and text alone, looked at quickly; None where there may be more to say."""
    role, content = item.get("role"), item.get("content")
    if len(item) != 2 or not (isinstance(role, str) and isinstance(content, str)):
        return None
    if (known := _NAMED.get(role)) is None or not content.isascii() or not content.strip():
        return None
    return Message(known, content)


def _role(item: dict[str, object], place: Location) -> Role:
    found = item.get("role")
    if found == "function":  # what a tool was called before there were others
        return "tool"
    for role in ROLES:
        if role == found:
            return role
    shown = f'"{found}"' if isinstance(found, str) else json_type(found)
    raise RowError(RowFault("roles", (*place, "role"), shown, f"one of {', '.join(ROLES)}"))


def _extra(item: dict[str, object], role: Role, place: Location) -> dict[str, Any]:
    """What the template is given besides role and content."""
    said = {key: value for key, value in item.items() if value is not None and value != []}
    for name, speaker in _SPOKEN_BY.items():
        if name in said and role != speaker:
            found = f"{name} of the {role}"
            raise RowError(RowFault("roles", place, found, f"it of the {speaker}"))
    extra: dict[str, Any] = {}
    if calls := _calls(said, place):
        extra["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if name in said:
            extra[name] = _text(said[name], (*place, name))
    if reasoning := _reasoning(said, place):
        extra["reasoning_content"] = reasoning
    return extra


def _calls(said: dict[str, object], place: Location) -> list[dict[str, Any]]:
    if "function_call" not in said:
        return list(tool_calls(said.get("tool_calls"), (*place, "tool_calls")))
    if "tool_calls" in said:
        found = "tool_calls and function_call"
        raise RowError(RowFault("several forms", place, found, "one of them"))
    return [call_of_old(said["function_call"], (*place, "function_call"))]


def _reasoning(said: dict[str, object], place: Location) -> str:
    """The reasoning, whichever name it goes by; blank is none."""
    found = {
        text: name
        for name in _REASONING
        if name in said and (text := _text(said[name], (*place, name))).strip()
    }
    if len(found) > 1:
        names = " and ".join(found.values())
        raise RowError(RowFault("several forms", place, f"different {names}", "one of them"))
    return next(iter(found), "")


def _weight(item: dict[str, object], role: Role, place: Location) -> float | None:
    weight, train = item.get("weight"), item.get("train")
    if not isinstance(train, bool | None):
        at = (*place, "train")
        raise RowError(RowFault("wrong type", at, json_type(train), "true or false"))
    if weight is None:
        return None if train is None else float(train)
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not 0 <= cast(float, weight) <= 1:
        found = str(weight) if number else json_type(weight)
        at = (*place, "weight")
        raise RowError(RowFault("wrong value", at, found, "a number from 0 to 1"))
    weight = cast(float, weight)
    if train is not None and train != (weight > 0):
        found = f'"train": {str(train).lower()} with the weight {weight}'
        raise RowError(RowFault("wrong value", place, found, "them to agree"))
    if weight > 0 and role != "assistant" and not train:
        expected = '0, or "train": true beside it to train what the assistant does not say'
        found = f"the weight {weight} of the {role}"
        raise RowError(RowFault("wrong value", place, found, expected))
    return float(weight)


def _text(value: object, place: Location) -> str:
    if not isinstance(value, str):
        raise RowError(RowFault("wrong type", place, json_type(value), "a string"))
    refuse_surrogates(place, value)
    return value


def _content(value: object, place: Location) -> str:
    if isinstance(value, list):
        value = "".join(_part(part, (*place, index)) for index, part in enumerate(value))
    return _text(value, place)


def _part(part: object, place: Location) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        if isinstance(text := part.get("text"), str):
            return text
        raise RowError(RowFault("wrong type", (*place, "text"), json_type(text), "a string"))
    kind = f'type "{part.get("type")}"' if isinstance(part, dict) else json_type(part)
    expected = "parts of type text only"
    raise RowError(RowFault("unsupported", place, f"a part of {kind}", expected))


def _order_faults(messages: Sequence[Message]) -> Iterable[RowFault]:
    roles = [message.role for message in messages]
    for index, role in enumerate(roles):
        at = ("messages", index)
        if role in _FIRST_ONLY and index > 0:
            yield RowFault("roles", at, f'the role "{role}"', "it first or not at all")
        if role == "tool" and (index == 0 or roles[index - 1] not in ("assistant", "tool")):
            yield RowFault("roles", at, 'the role "tool"', "it after an assistant")
    yield from _answer_faults(messages)
    if "assistant" not in roles:
        shown = ", ".join(roles) or "none"
        yield RowFault("roles", (), f"no assistant message (roles: {shown})", "at least one")


def _answer_faults(messages: Sequence[Message]) -> Iterable[RowFault]:
    """Answers to calls that nobody made, where calls and answers have ids."""
    ids: set[str | None] = {None}
    for index, message in enumerate(messages):
        extra = message.extra or {}
        if message.role == "assistant":
            ids = {call.get("id") for call in extra.get("tool_calls", ({},))}
        answered = extra.get("tool_call_id")
        if answered is not None and None not in ids and answered not in ids:
            known = ", ".join(sorted(filter(None, ids)))
            found = f'the tool_call_id "{answered}"'
            yield RowFault("wrong value", ("messages", index), found, f"one of {known}")


def refuse_unsupported(fields: dict[str, object], names: Iterable[str]) -> None:
    if found := [name for name in names if fields.get(name) is not None]:
        named = f"{', '.join(found)}, which vox does not support"
        raise RowError(RowFault("unsupported", (), named, "none"))


def refuse_surrogates(place: Location, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"half a surrogate pair (\\u{ord(text[error.start]):04x})"
        raise RowError(RowFault("half a character", place, found, "both halves or none")) from None
