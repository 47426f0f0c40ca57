"""Cut data files into blocks of rows, each tokenised by itself.

What is read here was checked before (`checked.py`): a fault found now means that the file has
changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vox_core.data.faults import RowError, changed
from vox_core.data.jsonl import raw_lines
from vox_core.data.records import readable
from vox_core.data.sides import Examples, Row, row_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_BYTES = 1 << 21
_FEWEST = 2
"""Rows of a block: an objective may compare a row with another one of its block."""


@dataclass(frozen=True, slots=True)
class RowMask:
    """Which lines of a file are used.

    Args:
        used: byte n is 1 if line n is used, else 0; there is no line 0.
        rows: how many are used.
    """

    used: bytes = field(repr=False)
    rows: int

    @classmethod
    def of(cls, line_R: NDArray[np.int64]) -> RowMask:
        """Of the numbers of the lines that are used."""
        used_L = np.zeros(int(line_R.max(initial=0)) + 1, np.bool_)
        used_L[line_R] = True
        return cls(used_L.tobytes(), len(line_R))

    def __contains__(self, line: int) -> bool:
        return line < len(self.used) and bool(self.used[line])

    @property
    def digest(self) -> str:
        """SHA-256 in hex; trailing zeros count for nothing."""
        return hashlib.sha256(self.used.rstrip(b"\0")).hexdigest()


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a file.

    Args:
        file: the file's number among those of the data set.
        lines: number and bytes of each row; None for a line that is too long.
    """

    path: Path
    file: int
    lines: Sequence[tuple[int, bytes | None]]

    def rows(self, examples: Examples | None = None) -> Iterator[Row]:
        """The rows.

        Args:
            examples: makes the sides of each; None for supervised training.

        Raises:
            DataError: D001, the file has changed.
        """
        others = [line for _, line in (*self.lines[1:], *self.lines[:1])]
        others = others if len(others) > 1 else [None]
        for (number, line), other in zip(self.lines, others, strict=True):
            try:
                yield row_of(line, self.path, number, examples, other)
            except RowError as fault:
                raise changed(self.path) from fault


def cut(
    paths: Sequence[Path],
    size: int = BLOCK_BYTES,
    masks: Sequence[RowMask | None] = (),
    lines: Sequence[Path] = (),
) -> Iterator[Block]:
    """Every row of every file, in order, or those that its mask has; blocks of about `size` bytes,
    of two rows at least, unless a file has one.

    Args:
        masks: of each file; of none, if none is given.
        lines: for each file, the JSONL with its rows; the file itself, if not given.

    Raises:
        DataError: D001, a file cannot be read.
    """
    for file, (path, mask, rows) in enumerate(zip_longest(paths, masks, lines or paths)):
        with readable(path):
            block, held = list[tuple[int, bytes | None]](), 0
            for number, _, line in raw_lines(rows):
                if mask is None or number in mask:
                    block.append((number, line))
                    held += len(line or b"")
                if held >= size and len(block) >= 2 * _FEWEST:
                    yield Block(path, file, block[:-_FEWEST])
                    block = block[-_FEWEST:]
                    held = sum(len(line or b"") for _, line in block)
            if block:
                yield Block(path, file, block)
