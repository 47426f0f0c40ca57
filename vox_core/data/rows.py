"""What a JSON object of a data file means: a conversation, a prompt with its completion, or a text.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "completion": "…"}      also instruction (+ input) with output or response
    {"text": "…"}

A row has exactly one of these forms. Other fields are not used, and their names are kept so that
somebody can be told; one that looks like a misspelt field of vox's is a fault. Roles: system
or developer may only come first, a tool answers an assistant or another tool, and someone must be
the assistant. Two turns of one role in a row are let through here, because many chat templates
take them; one that does not refuses the row when it is rendered, with the template's own words.

Content is a string, or a list of text parts, which are joined. Blank content is a fault, except
for system, developer and tool: an empty system prompt is how a template's default is turned off,
and a tool may return nothing. What vox would have to drop silently (tool calls, reasoning in a
field of its own, weights of single messages) is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, NoReturn, TypeAlias, get_args

from vox_core.data.jsonl import RowError, json_type

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
Kind: TypeAlias = Literal["chat", "completion", "text"]

ROLES: tuple[Role, ...] = get_args(Role)
PROMPTS = ("prompt", "instruction")
COMPLETIONS = ("completion", "output", "response")
FIELDS = ("messages", *PROMPTS, *COMPLETIONS, "text")

_NAMED: dict[str, Role] = {role: role for role in ROLES}
_FIRST_ONLY = ("system", "developer")
_MAY_BE_BLANK = ("system", "developer", "tool")
_UNSUPPORTED_IN_ROW = ("tools", "functions", "documents")
_UNSUPPORTED_IN_MESSAGE = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
    "weight",
    "train",
)
_ELSEWHERE_CALLED = {
    "conversation": "messages",
    "conversations": "messages",
    "question": "prompt",
    "query": "prompt",
    "answer": "completion",
    "content": "text",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """What one row says. `messages` for chat and completion (a user's and an assistant's), `text`
    for text."""

    kind: Kind
    messages: tuple[Message, ...] = ()
    text: str = ""
    unused: tuple[str, ...] = ()


def parse_row(fields: dict[str, object]) -> Row:
    """Read a row.

    Raises:
        RowError: with everything that is wrong with it.
    """
    if fields.keys() == {"messages"}:  # the usual case, which none of the rest can object to
        return Row("chat", _conversation(fields["messages"]))
    form = _form(fields)
    _refuse_unsupported(fields, _UNSUPPORTED_IN_ROW)
    unused = _unused(fields)
    if form == "text":
        return Row("text", text=_string("text", fields["text"]), unused=unused)
    if form == "completion":
        return Row("completion", _completion(fields), unused=unused)
    return Row("chat", _conversation(fields["messages"]), unused=unused)


def _unused(fields: dict[str, object]) -> tuple[str, ...]:
    """Fields that mean nothing to vox. `input` belongs to `instruction`."""
    used = {*FIELDS, "input"} if "instruction" in fields else set(FIELDS)
    unused = tuple(name for name in fields if name not in used)
    if near := [hint for name in unused if (hint := _misspelt(name))]:
        raise RowError("; ".join(near))
    return unused


def _misspelt(name: str) -> str | None:
    nearest = get_close_matches(name, FIELDS, n=1, cutoff=0.85)
    return f'found the field "{name}": is it meant as "{nearest[0]}"?' if nearest else None


def _form(fields: dict[str, object]) -> Kind:
    found: dict[Kind, list[str]] = {
        "chat": [name for name in ("messages",) if name in fields],
        "completion": [name for name in (*PROMPTS, *COMPLETIONS) if name in fields],
        "text": [name for name in ("text",) if name in fields],
    }
    forms = [form for form, names in found.items() if names]
    if not forms:
        _refuse_unknown(list(fields))
    if len(forms) > 1:
        names = ", ".join(name for form in forms for name in found[form])
        raise RowError(f"found fields of several forms ({names}), expected those of one")
    return forms[0]


def _refuse_unknown(names: Sequence[str]) -> NoReturn:
    if not names:
        raise RowError(f"found an object without fields, expected one of {', '.join(FIELDS)}")
    hints = [hint for name in names if (hint := _hint(name))]
    nearest = f" ({'; '.join(hints)})" if hints else ""
    shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    raise RowError(f"found the fields {shown}, expected one of {', '.join(FIELDS)}{nearest}")


def _hint(name: str) -> str | None:
    nearest = _ELSEWHERE_CALLED.get(name) or next(iter(get_close_matches(name, FIELDS, n=1)), None)
    return f'is "{name}" meant as "{nearest}"?' if nearest else None


def _refuse_unsupported(fields: dict[str, object], names: Iterable[str]) -> None:
    if found := [name for name in names if fields.get(name) is not None]:
        raise RowError(f"found {', '.join(found)}, which vox does not support, expected none")


# --- prompt and completion ------------------------------------------------------------------------


def _completion(fields: dict[str, object]) -> tuple[Message, Message]:
    prompt_name = _only_one(fields, PROMPTS)
    completion_name = _only_one(fields, COMPLETIONS)
    prompt = _string(prompt_name, fields[prompt_name])
    if prompt_name == "instruction" and (extra := fields.get("input")) not in (None, ""):
        prompt = f"{prompt}\n\n{_string('input', extra)}"
    completion = _string(completion_name, fields[completion_name])
    return Message("user", prompt), Message("assistant", completion)


def _only_one(fields: dict[str, object], names: Sequence[str]) -> str:
    found = [name for name in names if name in fields]
    if len(found) != 1:
        near = "; ".join(hint for name in fields if name not in FIELDS and (hint := _hint(name)))
        found_text = " and ".join(found) or "none"
        expected = f"expected one{f' ({near})' if near else ''}"
        raise RowError(f"found {found_text} of {', '.join(names)}, {expected}")
    return found[0]


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise RowError(f'found {json_type(value)} as "{name}", expected a string')
    _refuse_surrogates(name, value)
    if not value.strip():
        raise RowError(f'found "{name}" empty, expected text')
    return value


def _refuse_surrogates(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f'found half a surrogate pair (\\u{ord(text[error.start]):04x}) in "{name}", '
            "expected both halves or none"
        ) from None


# --- conversations --------------------------------------------------------------------------------


def _conversation(value: object) -> tuple[Message, ...]:
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
        _refuse_unsupported(item, _UNSUPPORTED_IN_MESSAGE)
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
    _refuse_surrogates(place, value)
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
