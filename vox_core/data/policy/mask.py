"""Which lines of a data file are used.

A mask takes a bit a line and lies in memory: an eighth of a megabyte for a million lines. Blocks of
the file (`blocks.py`) take their part of it along, to whatever process reads them.

Shape legend: L lines of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Mask:
    """The rows that are used.

    Args:
        bits: bit n, counted from the lowest of each byte, is line n; there is no line 0.
        rows: how many are used.
    """

    bits: bytes = field(repr=False)
    rows: int

    @classmethod
    def of(cls, line_R: NDArray[np.int64]) -> Mask:
        """Of the numbers of the lines that are used."""
        import numpy as np

        used_L = np.zeros(int(line_R.max(initial=0)) + 1, np.bool_)
        used_L[line_R] = True
        return cls(np.packbits(used_L, bitorder="little").tobytes(), len(line_R))

    def __contains__(self, line: int) -> bool:
        """Whether a line is used."""
        return line // 8 < len(self.bits) and bool(self.bits[line // 8] >> line % 8 & 1)

    @property
    def digest(self) -> str:
        """SHA-256 of the bits, in hex; trailing zeros count for nothing."""
        return hashlib.sha256(self.bits.rstrip(b"\0")).hexdigest()

    def part(self, line: int, count: int) -> str:
        """Lines [line, line + count), as `used` reads it; empty if none of them is used."""
        number = int.from_bytes(self.bits[line // 8 : (line + count) // 8 + 1], "little")
        number = (number >> line % 8) & ((1 << count) - 1)
        return f"{number:x}" if number else ""


def used(part: str, count: int) -> Sequence[bool]:
    """Of each of `count` lines, whether it is used."""
    return [bit == "1" for bit in f"{int(part or '0', 16):0{count}b}"[::-1]]
