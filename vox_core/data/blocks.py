"""Data files in blocks of whole lines, so that each can be read by whoever is free.

A block knows where it begins, the number of its first line, and which of its lines are used; its
records are parsed when they are asked for. What is read so has been looked at before
(`checked.py`): a fault found now means that the file has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vox_core.data.faults import RowError, changed
from vox_core.data.jsonl import BOM, MAX_LINE_BYTES
from vox_core.data.records import readable
from vox_core.data.rows import Record, read_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_BYTES = 1 << 21


@dataclass(frozen=True, slots=True)
class RowMask:
    """Which lines of a file are used: a bit a line.

    Args:
        bits: bit n, counted from the lowest of each byte, is line n; there is no line 0.
        rows: how many are used.
    """

    bits: bytes = field(repr=False)
    rows: int

    @classmethod
    def of(cls, line_R: NDArray[np.int64]) -> RowMask:
        """Of the numbers of the lines that are used."""
        used_L = np.zeros(int(line_R.max(initial=0)) + 1, np.bool_)
        used_L[line_R] = True
        return cls(np.packbits(used_L, bitorder="little").tobytes(), len(line_R))

    def __contains__(self, line: int) -> bool:
        return line // 8 < len(self.bits) and bool(self.bits[line // 8] >> line % 8 & 1)

    @property
    def digest(self) -> str:
        """SHA-256 of the bits, in hex; trailing zeros count for nothing."""
        return hashlib.sha256(self.bits.rstrip(b"\0")).hexdigest()

    def part(self, line: int, count: int) -> bytes:
        """Of each of `count` lines from `line`, 1 if it is used and 0 if not."""
        first = line // 8
        bits = np.frombuffer(self.bits[first : (line + count) // 8 + 1], np.uint8)
        used_L = np.unpackbits(bits, bitorder="little")[line - 8 * first :][:count]
        return used_L.tobytes().ljust(count, b"\0")


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes [start, start + size) of a file.

    Args:
        file: the file's number among those of the data set.
        line: the number of the first line, from 1.
        chosen: which of its lines are used, as `RowMask.part` gives it; None for all.
        lines: the JSONL with the rows of the file, if it is none itself.
    """

    path: Path
    file: int
    start: int
    size: int
    line: int
    chosen: bytes | None = None
    lines: str = ""

    def records(self) -> Iterator[Record]:
        """The rows.

        Raises:
            DataError: D001, the file has changed, or cannot be read.
        """
        with readable(self.path), Path(self.lines or self.path).open("rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        if self.start == 0:
            data = data.removeprefix(BOM)
        lines = data.split(b"\n")
        uses = repeat(1) if self.chosen is None else self.chosen
        for number, (line, use) in enumerate(zip(lines, uses, strict=False), start=self.line):
            if use and line.strip():
                try:
                    yield read_row(line, self.path, number)
                except RowError as fault:
                    raise changed(self.path) from fault


def cut(
    paths: Sequence[Path],
    size: int = BLOCK_BYTES,
    masks: Sequence[RowMask | None] = (),
    lines: Sequence[Path] = (),
) -> Iterator[Block]:
    """Every line of every file, in order, or those that its mask has; blocks of about `size` bytes.

    Args:
        masks: of each file; of none, if none is given.
        lines: for each file, the JSONL with its rows; the file itself, if not given.
    """
    for number, (path, mask, rows) in enumerate(zip_longest(paths, masks, lines or paths)):
        yield from _cut_file(path, number, size, mask, rows)


def _cut_file(
    path: Path, number: int, size: int, mask: RowMask | None, lines: Path
) -> Iterator[Block]:
    start, line, made = 0, 1, "" if lines == path else str(lines)
    with readable(path), lines.open("rb") as file:
        while data := file.read(size):
            data += file.readline(MAX_LINE_BYTES + 1) if not data.endswith(b"\n") else b""
            ends = data.count(b"\n")
            chosen = None if mask is None else mask.part(line, ends + 1)
            if chosen is None or any(chosen):
                yield Block(path, number, start, len(data), line, chosen, made)
            start += len(data)
            line += ends
