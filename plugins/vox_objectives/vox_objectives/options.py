"""Options of an objective, given as strings.

An objective is a pydantic dataclass, decorated with `options`, whose fields are its options.
"""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, dataclass_transform

import pydantic.dataclasses
from pydantic import ConfigDict, Field, ValidationError

from vox_core.contract import Objective, ObjectiveSpec
from vox_core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def options(kind: type[Any]) -> Any:
    """Make a class a frozen pydantic dataclass that refuses unknown options, NaN and infinity."""
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    return pydantic.dataclasses.dataclass(kind, config=config, frozen=True, kw_only=True)


def configure(kind: type[Objective], spec: ObjectiveSpec) -> Objective:
    """Build an objective from its options.

    Raises:
        ConfigError: C001, an unknown option; C002, a value of the wrong type or outside its range.
            It names every fault.
    """
    known = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]  # by `options`
    try:
        return kind(**spec.options)
    except ValidationError as error:
        faults = [_fault(detail, known) for detail in error.errors()]
    unknown = set(spec.options) - set(known)
    raise ConfigError(
        "C001" if unknown else "C002",
        f"an option of objective {spec.name!r} is {'unknown' if unknown else 'wrong'}",
        where="--objective-option",
        expected=f"options: {', '.join(known) or 'none'}",
        faults=faults,
        remedy="correct or remove it: -O NAME=VALUE",
    )


def _fault(detail: ErrorDetails, known: list[str]) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "unexpected_keyword_argument":
        near = get_close_matches(name, known, n=1)
        return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")
    message = detail["msg"].removeprefix("Value error, ")
    message = f"{message[0].lower()}{message[1:]}"
    return f"{name} = {detail['input']!r}: {message}" if name else message
