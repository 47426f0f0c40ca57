"""Faults by kind, so that a thousand of one kind are one line.

Two faults are of one kind if they differ in numbers alone, in the place within a row, or in what
was found between quotation marks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SHOWN = 20
_INDEX = re.compile(r"\[\d+\]")
_FOUND = re.compile(r'^(found )"(?:[^"\\]|\\.)*"(?= as )')
_NUMBER = re.compile(r"(?<!-)\b\d[\d,]*\b|\b0x[0-9a-f]+\b|\\u[0-9a-f]{4}")


def kind_of(fault: str) -> str:
    """What a fault has in common with others."""
    text = _INDEX.sub("[…]", fault)
    text = _FOUND.sub(r'\1"…"', text)
    return _NUMBER.sub("N", text)


@dataclass
class Faults:
    """Faults of many rows: counted by kind, the first of them whole.

    Args:
        total: of all kinds.
        kinds: kind -> how many.
        first: the first of all, with their places.
    """

    total: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)

    def add(self, place: str, fault: str) -> None:
        kind = kind_of(fault)
        self.total += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if len(self.first) < SHOWN:
            self.first.append(f"{place}: {fault}")

    def by_number(self) -> list[tuple[str, int]]:
        """The most frequent kind first; those that are as frequent in the order of their faults."""
        return sorted(self.kinds.items(), key=lambda item: -item[1])
