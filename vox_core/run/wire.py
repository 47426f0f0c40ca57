"""What a line of `telemetry.jsonl` looks like, read off the event dataclasses.

    {"event": "step", "time": 1763793255.1, "step": 1, "loss": 2.31, …}

`time` is seconds since the epoch (UTC). A float that is not finite is null, which JSON has, instead
of NaN, which it has not; a field that is None is left out. A `Notice` is called `warning` or
`notice` by its level, which is not written. A backend may emit events of its own: their lines have
whatever fields they like, and are not read back.

The same table makes the writer's lines, the reader's events and
docs/reference/telemetry.schema.json (tools/reference.py), so that none of them can be out of step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from vox_core.contract import Event, Notice, StepDone

Kind: TypeAlias = Literal["integer", "number", "string", "strings", "counts"]

WARNING = "warning"
TOKENS_PER_SECOND = "tokens_per_second"
_LARGEST = 2**63 - 1
_KINDS: dict[object, Kind] = {
    int: "integer",
    float: "number",
    str: "string",
    tuple[str, ...]: "strings",
    Mapping[str, int]: "counts",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """What a field of a line takes.

    Args:
        choices: the only texts that will do; empty for any.
        assumed: where it is missing, as in files of an older vox, there is a default for it.
        optional: it may be missing in files of this one.
    """

    kind: Kind
    choices: tuple[str, ...] = ()
    assumed: bool = False
    optional: bool = False

    def read(self, value: object) -> Any:
        """The value for the event.

        Raises:
            ValueError: it is of another type.
        """
        if self._fits(value):
            return _float(value) if self.kind == "number" else value
        raise ValueError(f"found {str(value)[:40]!r}, expected {self.kind}")

    def _fits(self, value: object) -> bool:
        match self.kind:
            case "integer":
                return _is_count(value)
            case "number":
                return value is None or type(value) in (int, float)
            case "strings":
                return isinstance(value, list) and all(isinstance(each, str) for each in value)
            case "counts":
                return isinstance(value, dict) and all(map(_is_count, value.values()))
        return isinstance(value, str) and (not self.choices or value in self.choices)

    def schema(self) -> dict[str, Any]:
        """As JSON schema has it."""
        match self.kind:
            case "integer":
                return {"type": "integer", "minimum": 0}
            case "number":
                return {"type": ["number", "null"]}
            case "strings":
                return {"type": "array", "items": {"type": "string"}}
            case "counts":
                return {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}
        return {"enum": list(self.choices)} if self.choices else {"type": "string"}


def line_of(event: Event, now: float) -> dict[str, Any]:
    """The event as the flat object that is written."""
    given = {key: _number(value) for key, value in asdict(event).items() if value is not None}
    if isinstance(event, Notice):
        del given["level"]
    if isinstance(event, StepDone):
        given[TOKENS_PER_SECOND] = round(event.tokens / max(event.seconds, 1e-9), 1)
    return {"event": _name(event), "time": round(now, 3), **given}


def event_of(line: Mapping[str, Any]) -> Event | None:
    """The event that a line tells of; None for one that is not known here.

    Raises:
        ValueError: a field is missing, or of the wrong type.
    """
    name = line.get("event")
    kind = kinds().get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    given = {}
    for key, slot in slots()[str(name)].items():
        if key in line:
            given[key] = slot.read(line[key])
        elif slot.optional:
            given[key] = None
        elif not slot.assumed:
            raise ValueError(f"{key} is missing")
    if name == WARNING:
        given["level"] = "warning"
    return kind(**given)


@cache
def kinds() -> dict[str, type[Event]]:
    """Name on a line -> event; those of `vox_core.contract` alone."""
    ours = [kind for kind in Event.__subclasses__() if kind.__module__ == Event.__module__]
    return {**{kind.name: kind for kind in ours}, WARNING: Notice}


@cache
def slots() -> dict[str, dict[str, Slot]]:
    """Name on a line -> field -> what it takes, in the order of the dataclass."""
    return {
        name: {
            field.name: _slot(get_type_hints(kind)[field.name], field.default is not MISSING)
            for field in fields(kind)
            if (kind, field.name) != (Notice, "level")
        }
        for name, kind in kinds().items()
    }


def _slot(hint: Any, assumed: bool) -> Slot:
    if isinstance(hint, UnionType):
        (inner,) = (each for each in get_args(hint) if each is not NoneType)
        return Slot(_KINDS[inner], assumed=assumed, optional=True)
    if get_origin(hint) is Literal:
        return Slot("string", get_args(hint), assumed)
    return Slot(_KINDS[hint], assumed=assumed)


def _name(event: Event) -> str:
    return WARNING if isinstance(event, Notice) and event.level == "warning" else event.name


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _float(value: Any) -> float:
    try:
        return math.nan if value is None else float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.inf if value > 0 else -math.inf


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
