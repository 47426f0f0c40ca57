"""What a JSON object of a data file means: a conversation, a prompt with its completion, or a text.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "completion": "…"}      also instruction (+ input) with output or response
    {"text": "…"}

A row has exactly one of these forms. Other fields are not used, and their names are kept so that
somebody can be told; one that looks like a misspelt field of vox's is a fault. What
a conversation is made of is `messages.py`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, TypeAlias

from vox_core.data.jsonl import RowError, json_type
from vox_core.data.messages import Message, conversation, refuse_surrogates, refuse_unsupported
from vox_core.data.tools import tool_schemas

Kind: TypeAlias = Literal["chat", "completion", "text", "preference"]

PROMPTS = ("prompt", "instruction")
COMPLETIONS = ("completion", "output", "response")
FIELDS = ("messages", *PROMPTS, *COMPLETIONS, "text")

_TOOLS = ("tools", "functions")
_UNSUPPORTED_IN_ROW = ("documents",)
_ELSEWHERE_CALLED = {
    "conversation": "messages",
    "conversations": "messages",
    "question": "prompt",
    "query": "prompt",
    "answer": "completion",
    "content": "text",
}


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


@dataclass(frozen=True, slots=True)
class Row:
    """What one row says.

    Args:
        messages: for chat and completion (a user's and an assistant's); of a preference, those up
            to and with the chosen answer.
        text: for text.
        rejected: of a preference, the messages that stand in place of the chosen ones.
        tools: JSON schemas of the functions that the assistant may call.
        unused: names of fields that mean nothing to vox.
    """

    kind: Kind
    messages: tuple[Message, ...] = ()
    text: str = ""
    unused: tuple[str, ...] = ()
    rejected: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    attributes: Attributes = NO_ATTRIBUTES


def parse_row(fields: dict[str, object]) -> Row:
    """Read a row.

    Raises:
        RowError: with everything that is wrong with it.
    """
    if fields.keys() == {"messages"}:  # the usual case, which none of the rest can object to
        return Row("chat", conversation(fields["messages"]))
    form = _form(fields)
    refuse_unsupported(fields, _UNSUPPORTED_IN_ROW)
    unused = _unused(fields)
    if form == "text":
        refuse_unsupported(fields, _TOOLS)
        return Row("text", text=_string("text", fields["text"]), unused=unused)
    tools = tuple(tool for name in _TOOLS for tool in tool_schemas(fields.get(name), name))
    if form == "completion":
        return Row("completion", _completion(fields), unused=unused, tools=tools)
    return Row("chat", conversation(fields["messages"]), unused=unused, tools=tools)


def _unused(fields: dict[str, object]) -> tuple[str, ...]:
    """Fields that mean nothing to vox. `input` belongs to `instruction`."""
    used = {*FIELDS, "input"} if "instruction" in fields else set(FIELDS)
    known = (*used, *_TOOLS, "provenance")
    unused = tuple(name for name in fields if name not in known)
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
    refuse_surrogates(name, value)
    if not value.strip():
        raise RowError(f'found "{name}" empty, expected text')
    return value
