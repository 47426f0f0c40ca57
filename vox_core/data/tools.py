"""Functions that an assistant may call, and its calls of them, in the form that OpenAI gave them.

    {"type": "function", "function": {"name": "add", "description": "…", "parameters": {…}}}
    {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}

`arguments` is an object or an object written as JSON text, and is an object from here on: that is
what transformers hands to a chat template (the few that want the text get it, `takes.py`). A
function or a call without the outer object is given one. What else a call says of itself is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from vox_core.data.faults import Location, RowError, RowFault
from vox_core.data.jsonl import json_type, parse_object

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
        value = _parsed_list(value, name)
    return tuple(_each(value, (name,), _schema))


def tool_calls(value: object, place: Location) -> tuple[Call, ...]:
    """The calls that an assistant makes in one message.

    Raises:
        RowError: with everything that is wrong with them.
    """
    return tuple(_each(value, place, _call))


def call_of_old(value: object, place: Location) -> Call:
    """A `function_call`, the form before `tool_calls`, as one of those.

    Raises:
        RowError: it is none.
    """
    return _call(value, place)


def _each(
    value: object, place: Location, read: Callable[[object, Location], dict[str, Any]]
) -> Sequence[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowError(RowFault("wrong type", place, json_type(value), "a list"))
    found: list[dict[str, Any]] = []
    faults: list[RowFault] = []
    for index, item in enumerate(value):
        try:
            found.append(read(item, (*place, index)))
        except RowError as fault:
            faults += fault.faults
    if faults:
        raise RowError(*faults)
    return found


def _schema(item: object, place: Location) -> dict[str, Any]:
    fields = _object(item, place)
    schema = fields if "function" in fields else {"type": "function", "function": fields}
    _require_function(schema, place)
    _name(_object(schema["function"], (*place, "function")), place)
    _refuse_unwritable(place, schema)
    return schema


def _call(item: object, place: Location) -> Call:
    fields = _object(item, place)
    if "function" not in fields:
        rest = {key: value for key, value in fields.items() if key not in _CALL_KEYS}
        function = {key: fields[key] for key in _CALL_KEYS if key in fields}
        fields = {"type": "function", **rest, "function": function}
    _require_function(fields, place)
    if not isinstance(id := fields.get("id"), str | None):
        raise RowError(RowFault("wrong type", (*place, "id"), json_type(id), "a string"))
    function = _object(fields["function"], (*place, "function"))
    _name(function, place)
    arguments = _arguments(function.get("arguments"), (*place, "function", "arguments"))
    call = {**fields, "type": "function", "function": {**function, "arguments": arguments}}
    _refuse_unwritable(place, call)
    return call


def _require_function(fields: dict[str, Any], place: Location) -> None:
    if fields.get("type") not in (None, "function"):
        found = f'"{kind}"' if isinstance(kind := fields["type"], str) else json_type(kind)
        raise RowError(RowFault("wrong value", (*place, "type"), found, '"function"'))


def _name(function: dict[str, Any], place: Location) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        found = "an empty string" if isinstance(name, str) else json_type(name)
        raise RowError(RowFault("wrong value", (*place, "name"), found, "that of a function"))
    return name


def _arguments(value: object, place: Location) -> dict[str, Any]:
    """None and empty text are what is written for a function that takes none."""
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        return _object(value, place, "an object or JSON text of one")
    try:
        return parse_object(value.encode("utf-8", "surrogatepass"))
    except RowError as fault:
        inner = fault.faults[0]
        raise RowError(RowFault(inner.code, place, inner.found, "a JSON object")) from None


def _parsed_list(value: str, name: str) -> object:
    try:
        return parse_object(b'{"list":' + value.encode("utf-8", "surrogatepass") + b"}")["list"]
    except RowError:
        raise RowError(RowFault("invalid JSON", (name,), "no JSON", "a list")) from None


def _object(value: object, place: Location, expected: str = "an object") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(RowFault("wrong type", place, json_type(value), expected))
    return value


def _refuse_unwritable(place: Location, value: object) -> None:
    """What no file of UTF-8 can hold, a template cannot be given either."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        found = "half a surrogate pair"
        raise RowError(RowFault("half a character", place, found, "both or none")) from None
    except RecursionError:
        found = "an object nested too deeply"
        raise RowError(RowFault("wrong value", place, found, "less")) from None
