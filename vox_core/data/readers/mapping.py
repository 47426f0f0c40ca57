"""`--field` and `[data.fields]`: the column or path of a row that holds each field.

    [data.fields]                       --field prompt=title
    prompt = "title"                    --field completion=answers.0.text
    completion = "answers.0.text"       --field text=
    text = ""

A path goes down into objects by name and into lists by number; a field that is called "a.b" is
found before the b of an a. Fields that are named here take the place of those that the row has
under the same name, and are not looked for under their old one. An empty path leaves a field out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from vox_core.data.faults import RowError, RowFault

FieldMap: TypeAlias = Mapping[str, str]
NO_FIELDS: FieldMap = {}
_MISSING = object()


def mapped(values: dict[str, object], fields: FieldMap) -> dict[str, object]:
    """A row with its fields where vox looks for them.

    Raises:
        RowError: it has none of the fields that are named.
    """
    if not fields:
        return values
    wanted = {name: path for name, path in fields.items() if path}
    found = {name: _find(values, path) for name, path in wanted.items()}
    there = {name: value for name, value in found.items() if value is not _MISSING}
    if wanted and not there:
        named = ", ".join(wanted.values())
        shown = ", ".join(list(values)[:10]) or "none"
        expected = f"one that --field names ({named})"
        raise RowError(RowFault("unknown form", (), f"the fields {shown}", expected))
    moved = {_root(values, wanted[name]) for name in there}
    rest = {k: v for k, v in values.items() if k not in moved and k not in fields}
    return {**there, **rest}


def _find(values: dict[str, object], path: str) -> object:
    if path in values:
        return values[path]
    value: object = values
    for part in path.split("."):
        if isinstance(value, dict):
            value = value.get(part, _MISSING)
        elif isinstance(value, list) and part.isascii() and part.isdigit():
            value = value[int(part)] if len(part) < 10 and int(part) < len(value) else _MISSING
        else:
            return _MISSING
    return value


def _root(values: dict[str, object], path: str) -> str:
    return path if path in values else path.partition(".")[0]
