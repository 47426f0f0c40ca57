"""Functions that an assistant may call, and its calls of them, in the form that OpenAI gave them.

    {"type": "function", "function": {"name": "add", "description": "…", "parameters": {…}}}
    {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}

`arguments` is an object or an object written as JSON text, and is an object from here on: that is
what transformers hands to a chat template (the few that want the text get it,
`template_features.py`). A function or a call without the outer object is given one. Other fields of
a call are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from vox_core.data.faults import Location, RowError, all_of, faulty, json_type, typed
from vox_core.data.jsonl import parse_value

Call: TypeAlias = dict[str, Any]

_CALL_KEYS = ("name", "arguments")


def tool_schemas(value: object, name: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """The functions of a row.

    Args:
        value: a list of them, or one written as JSON text; null for none.

    Raises:
        RowError: with everything that is wrong with them.
    """
    if isinstance(value, str):
        try:
            value = parse_value(value)
        except RowError:
            raise faulty("invalid JSON", (name,), "no JSON", "a list") from None
    return tuple(_each(value, (name,), _schema))


def tool_calls(value: object, place: Location) -> list[Call]:
    """The calls that an assistant makes in one message.

    Raises:
        RowError: with everything that is wrong with them.
    """
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
    """One call; also a `function_call`, the form before `tool_calls`.

    Raises:
        RowError: it is none.
    """
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
