"""Convert pydantic's validation errors to fault lines; unknown keys get the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def settings_faults(kind: type[BaseModel], error: ValidationError) -> list[str]:
    """Return every fault of a table of `kind`, one line each."""
    return [settings_fault(kind, detail) for detail in error.errors()]


def nearest(key: str, known: Iterator[str] | list[str]) -> str:
    """Return `; did you mean …?` if a key of `known` is close, else ""."""
    near = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def settings_fault(kind: type[BaseModel], detail: ErrorDetails) -> str:
    """Return one validation error as a line."""
    what = detail["msg"].removeprefix("Value error, ")
    what = f"{what[0].lower()}{what[1:]}"
    if not detail["loc"]:  # about the table as a whole
        return what
    place, key = _place(detail["loc"][:-1]), str(detail["loc"][-1])
    if detail["type"] == "extra_forbidden":
        return f"{place}{key} is unknown{nearest(key, _keys_at(kind, detail['loc'][:-1]))}"
    if detail["type"] == "missing":
        return f"{place}{key} is missing"
    if isinstance(detail["loc"][-1], int):
        return f"{_place(detail['loc'])}{what}"
    return f"{place}{key} = {detail['input']!r}: {what}"


def _place(location: tuple[int | str, ...]) -> str:
    """Return `[[source]] 2: ` for the second table of an array."""
    words = [f" {part + 1}" if isinstance(part, int) else f"[[{part}]]" for part in location]
    return f"{''.join(words)}: " if words else ""


def _keys_at(kind: type[BaseModel], location: tuple[int | str, ...]) -> Iterator[str]:
    for part in location:
        if isinstance(part, str):
            field = next((f for n, f in kind.model_fields.items() if part in (n, f.alias)), None)
            inner = _table_in(field.annotation) if field else None
            if inner is None:
                return
            kind = inner
    yield from (field.alias or name for name, field in kind.model_fields.items())


def _table_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model class within an annotation, such as that of `tuple[Source, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_table_in(one) for one in get_args(annotation))
    return next((one for one in found if one), None)
