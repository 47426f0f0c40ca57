"""What is wrong with a row, as data: a code, a location in the row, what was found and expected.

Messages are rendered from it, and faults are counted by code and location; nothing reads the text
of a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

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


@dataclass(frozen=True, slots=True)
class RowFault:
    """One thing that is wrong with a row."""

    code: Code
    location: Location
    found: str
    expected: str

    @property
    def kind(self) -> str:
        """The group it is counted in: its code and its location without indices."""
        anywhere = tuple("…" if isinstance(part, int) else part for part in self.location)
        return f"{self.code} in {shown(anywhere)}" if anywhere else self.code

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
        """Raises:
        ValueError: it is not what `to_json` gives.
        """
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
    """What is wrong with a whole file, such as the header of a table."""


def shown(location: Location) -> str:
    """As in a message: `"text"` for a field, `messages[3].role` for what is inside of one."""
    if len(location) == 1:
        return f'"{location[0]}"'
    first, *rest = location
    inner = (f"[{part}]" if isinstance(part, int) or part == "…" else f".{part}" for part in rest)
    return f"{first}{''.join(inner)}"


def changed(path: Path) -> DataError:
    """The error for a data file whose bytes changed while vox read it."""
    return DataError(
        "D001",
        "a data file changed while it was read",
        where=path,
        found="other content than a moment before",
        expected="a file that nobody writes to",
        remedy="run again when it is written",
    )
