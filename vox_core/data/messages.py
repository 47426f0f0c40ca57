"""Conversations: a row's list of messages, each fault found where it stands.

Roles: system or developer may only come first, a tool answers an assistant or another tool, and
someone must be the assistant. Two turns of one role in a row are let through here, because many
chat templates take them; one that does not refuses the row when it is rendered, with the template's
own words.

Content is a string, or a list of text parts, which are joined. Blank content is a fault, except
for system, developer and tool: an empty system prompt is how a template's default is turned off,
and a tool may return nothing. What vox would have to drop silently (tool calls, reasoning in a
field of its own, weights of single messages) is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from vox_core.data.jsonl import RowError, json_type

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]

ROLES: tuple[Role, ...] = get_args(Role)

_NAMED: dict[str, Role] = {role: role for role in ROLES}
_FIRST_ONLY = ("system", "developer")
_MAY_BE_BLANK = ("system", "developer", "tool")
_UNSUPPORTED_IN_MESSAGE = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
    "weight",
    "train",
)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Args:
        extra: what else the chat template is given of it: tool_calls, tool_call_id, name,
            reasoning_content.
        weight: of what it says, as something to be trained; None leaves it to the role.
    """

    role: Role
    content: str
    extra: Mapping[str, Any] | None = None
    weight: float | None = None


def conversation(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise RowError(f'found {json_type(value)} as "messages", expected a list')
    messages: list[Message] = []
    faults: list[str] = []
    for index, item in enumerate(value):
        try:
            messages.append(_message(item, f"messages[{index}]"))
        except RowError as fault:
            faults += fault.faults
    if not faults:
        faults = list(_order_faults(messages))
    if faults:
        raise RowError(*faults)
    return tuple(messages)


def _message(item: object, place: str) -> Message:
    if not isinstance(item, dict):
        raise RowError(f"found {json_type(item)} as {place}, expected an object")
    if usual := _usual_message(item):
        return usual
    role = _role(item, place)
    try:
        refuse_unsupported(item, _UNSUPPORTED_IN_MESSAGE)
    except RowError as fault:
        raise RowError(f"in {place} {fault.faults[0]}") from None
    content = _content(item.get("content"), f"{place}.content")
    if not content.strip() and role not in _MAY_BE_BLANK:
        raise RowError(f"found {place}.content of the {role} empty, expected text")
    return Message(role, content)


def _usual_message(item: dict[str, object]) -> Message | None:
    """A message of role and text alone, looked at quickly; None where there may be more to say."""
    role, content = item.get("role"), item.get("content")
    if len(item) != 2 or not (isinstance(role, str) and isinstance(content, str)):
        return None
    if (known := _NAMED.get(role)) is None or not content.isascii() or not content.strip():
        return None
    return Message(known, content)


def _role(item: dict[str, object], place: str) -> Role:
    found = item.get("role")
    for role in ROLES:
        if role == found:
            return role
    shown = f'"{found}"' if isinstance(found, str) else json_type(found)
    raise RowError(f"found {shown} as {place}.role, expected one of {', '.join(ROLES)}")


def _content(value: object, place: str) -> str:
    if isinstance(value, list):
        value = "".join(_part(part, place) for part in value)
    if not isinstance(value, str):
        raise RowError(f"found {json_type(value)} as {place}, expected a string")
    refuse_surrogates(place, value)
    return value


def _part(part: object, place: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        if isinstance(text := part.get("text"), str):
            return text
        raise RowError(f"found {json_type(text)} as the text of a part of {place}, expected text")
    kind = f'type "{part.get("type")}"' if isinstance(part, dict) else json_type(part)
    raise RowError(f"found a part of {kind} in {place}, expected parts of type text only")


def _order_faults(messages: Sequence[Message]) -> Iterable[str]:
    roles = [message.role for message in messages]
    for index, role in enumerate(roles):
        if role in _FIRST_ONLY and index > 0:
            yield f'found the role "{role}" in messages[{index}], expected it first or not at all'
        if role == "tool" and (index == 0 or roles[index - 1] not in ("assistant", "tool")):
            yield f'found the role "tool" in messages[{index}], expected it after an assistant'
    if "assistant" not in roles:
        shown = ", ".join(roles) or "none"
        yield f"found no assistant message (roles: {shown}), expected at least one"


def refuse_unsupported(fields: dict[str, object], names: Iterable[str]) -> None:
    if found := [name for name in names if fields.get(name) is not None]:
        raise RowError(f"found {', '.join(found)}, which vox does not support, expected none")


def refuse_surrogates(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f'found half a surrogate pair (\\u{ord(text[error.start]):04x}) in "{name}", '
            "expected both halves or none"
        ) from None
