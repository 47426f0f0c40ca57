"""Faults of rows as data: code, location in the row, found, expected.

Messages are rendered from it, and faults are counted by code and location; nothing parses the text
of a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from vox_core.errors import DataError

Code: TypeAlias = Literal[
    "line too long",
    "invalid UTF-8",
    "invalid JSON",
    "repeated key",
    "half a character",
    "no object",
    "misspelt field",
    "unsupported",
    "empty",
    "roles",
    "unknown form",
    "several forms",
    "preference pair",
    "wrong type",
    "wrong value",
    "table",
    "damaged file",
    "other format",
]
CODES: tuple[Code, ...] = get_args(Code)

Location: TypeAlias = tuple[str | int, ...]
"""Names and indices from the row down: ("messages", 3, "role"); () for the row itself."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowFault:
    """A fault of a row, with its location."""

    code: Code
    location: Location
    found: str
    expected: str

    @property
    def kind(self) -> str:
        """The group it is counted in: its code and its location without indices."""
        anywhere = tuple("…" if isinstance(part, int) else part for part in self.location)
        return f"{self.code} in {shown(anywhere)}" if anywhere else self.code

    @property
    def of_every_row(self) -> RowFault:
        return replace(self, found=f"in every row {self.found}")

    def __str__(self) -> str:
        if not self.location:
            return f"found {self.found}, expected {self.expected}"
        is_value = self.code in ("wrong value", "roles") and isinstance(self.location[-1], str)
        link = "as" if is_value or self.code == "wrong type" else "in"
        return f"found {self.found} {link} {shown(self.location)}, expected {self.expected}"

    def to_json(self) -> list[object]:
        return [self.code, self.location, self.found, self.expected]

    @classmethod
    def from_json(cls, data: list[object]) -> RowFault:
        """Read what `to_json` gives (ValueError otherwise)."""
        match data:
            case [code, list(location), str(found), str(expected)] if code in CODES:
                return cls(code, tuple(location), found, expected)
        raise ValueError(data)


class RowError(Exception):
    """Everything that is wrong with one row."""

    def __init__(self, *faults: RowFault) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = faults


class FileError(RowError):
    """Faults of a whole file, such as of a table's header."""


def shown(location: Location) -> str:
    """As in a message: `"text"` for a field, `messages[3].role` for a part of one."""
    if len(location) == 1:
        return f'"{location[0]}"'
    first, *rest = location
    inner = (f"[{part}]" if isinstance(part, int) or part == "…" else f".{part}" for part in rest)
    return f"{first}{''.join(inner)}"


# --- checks ---------------------------------------------------------------------------------------

_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}


def faulty(code: Code, location: Location, found: str, expected: str) -> RowError:
    return RowError(RowFault(code, location, found, expected))


def all_of(*reads: Callable[[], Any]) -> list[Any]:
    """Return the results of all `reads`, or raise the faults of all that fail."""
    results, faults = [], list[RowFault]()
    for read in reads:
        try:
            results.append(read())
        except RowError as error:
            faults += error.faults
    if faults:
        raise RowError(*faults)
    return results


def json_type(value: object) -> str:
    """Return the JSON type of `value`, for messages."""
    return "null" if value is None else _TYPES.get(type(value), "a number")


def typed(value: object, kind: type[T], location: Location, expected: str = "") -> T:
    """`value`, which is of type `kind`; "wrong type" if it is not."""
    if isinstance(value, kind):
        return value
    raise faulty("wrong type", location, json_type(value), expected or _TYPES[kind])


def text_of(value: object, location: Location, expected: str = "text") -> str:
    """`value`, which is a string that UTF-8 can encode.

    Args:
        expected: what a blank string lacks; blank ones are allowed if it is empty.
    """
    text = typed(value, str, location)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"half a surrogate pair (\\u{ord(text[error.start]):04x})"
        raise faulty("half a character", location, found, "both halves or none") from None
    if expected and not text.strip():
        raise faulty("empty", location, "nothing", expected)
    return text


def changed(path: Path) -> DataError:
    """The error for a data file whose bytes changed while vox read it."""
    return DataError(
        "D001",
        "a data file changed while it was read",
        where=path,
        found="other content than a moment before",
        remedy="run again when it is written",
    )
