"""The rows of a mixture, copied as the bytes that they are.

A piece of the mixture is put together at a time: its rows are read in the order in which they lie
in their files, and written in the order of the mixture. So memory is bounded by a piece, and a
source is read from front to back a few times, however its rows are shuffled.

A row that lacks its lane gets it before its closing brace; one whose lane is empty is written anew,
because a second key of that name would be a fault.

Shape legend: R rows of the mixture, P rows of a piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING

import numpy as np

from vox_core.data.mix.scan import EMPTY_LANE, WITHOUT_LANE, Pool
from vox_core.data.records import readable

if TYPE_CHECKING:
    from vox_core.contract import Ints

PIECE_BYTES, PIECE_ROWS = 1 << 26, 1 << 18
_READ_BYTES = 1 << 18


def pieces(
    pools: Sequence[Pool], lanes: Sequence[str | None], sources_R: Ints, rows_R: Ints
) -> Iterator[bytes]:
    """The mixture in pieces of whole lines.

    Args:
        lanes: of each pool, for the rows that have none.
        sources_R, rows_R: the mixture, as `draw.mixed` gives it.

    Raises:
        DataError: D001, a source cannot be read.
    """
    written = [_LaneWriter(lane) for lane in lanes]
    with ExitStack() as stack:
        opened = [_opened(pool, stack) for pool in pools]
        for start, stop in _extents(pools, sources_R, rows_R):
            yield _piece(pools, opened, written, sources_R[start:stop], rows_R[start:stop])


def _opened(pool: Pool, stack: ExitStack) -> IO[bytes]:
    with readable(pool.path):
        return stack.enter_context(pool.path.open("rb", buffering=0))


def _extents(pools: Sequence[Pool], sources_R: Ints, rows_R: Ints) -> Iterator[tuple[int, int]]:
    sizes_R = np.zeros(len(rows_R), np.int64)
    for number, pool in enumerate(pools):
        of_it_R = sources_R == number
        sizes_R[of_it_R] = pool.sizes_N[rows_R[of_it_R]]
    ends_R, start = np.cumsum(sizes_R), 0
    while start < len(rows_R):
        before = int(ends_R[start - 1]) if start else 0
        stop = int(np.searchsorted(ends_R, before + PIECE_BYTES, "right"))
        stop = min(max(stop, start + 1), start + PIECE_ROWS)
        yield start, stop
        start = stop


def _piece(
    pools: Sequence[Pool],
    opened: Sequence[IO[bytes]],
    written: Sequence[_LaneWriter],
    sources_P: Ints,
    rows_P: Ints,
) -> bytes:
    lines: list[bytes] = [b""] * len(rows_P)
    for number, (pool, file, writer) in enumerate(zip(pools, opened, written, strict=True)):
        at_P = np.flatnonzero(sources_P == number)
        at_P = at_P[np.argsort(rows_P[at_P], kind="stable")]
        chosen = rows_P[at_P]
        columns = (at_P, pool.starts_N[chosen], pool.sizes_N[chosen], pool.lanes_N[chosen])
        with readable(pool.path):
            for at, row in writer.rows(file, *(column.tolist() for column in columns)):
                lines[at] = row
    lines.append(b"")
    return b"\n".join(lines)


class _LaneWriter:
    """Rows of one source, each with its lane."""

    def __init__(self, lane: str | None) -> None:
        self._lane = lane
        self._end = f', "lane": {json.dumps(lane)}}}'.encode()

    def rows(
        self,
        file: IO[bytes],
        at_P: Sequence[int],
        starts_P: Sequence[int],
        sizes_P: Sequence[int],
        lanes_P: Sequence[int],
    ) -> Iterator[tuple[int, bytes]]:
        """(place in the piece, row); rows lie in order."""
        rows = rows_at(file, starts_P, sizes_P)
        for at, row, lane in zip(at_P, rows, lanes_P, strict=True):
            yield at, self._laned(row, lane) if lane else row

    def _laned(self, row: bytes, lane: int) -> bytes:
        if lane == WITHOUT_LANE:
            return row[:-1].rstrip() + self._end
        assert lane == EMPTY_LANE
        return json.dumps({**json.loads(row), "lane": self._lane}).encode()


def rows_at(file: IO[bytes], starts: Sequence[int], sizes: Sequence[int]) -> Iterator[bytes]:
    """Rows of a file, in the order in which they lie in it."""
    block, first, end = b"", 0, 0
    for start, size in zip(starts, sizes, strict=True):
        if start + size > end:
            block, first = _read(file, start, max(size, _READ_BYTES)), start
            end = first + len(block)
        yield block[start - first : start - first + size]


def _read(file: IO[bytes], start: int, size: int) -> bytes:
    """Up to `size` bytes; fewer at the end of the file alone."""
    file.seek(start)
    parts: list[bytes] = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
