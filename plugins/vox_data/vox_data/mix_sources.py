"""The rows of a mixture's sources: which may be drawn, and their bytes.

The core checks, filters and compares rows (`RowFacts`); a `Pool` adds where each row lies in its
file. The mixture is written a piece at a time: the rows of a piece are read in the order of their
files and written in the order of the mixture, so memory is bounded by a piece, and a source is read
from front to back a few times, however its rows are shuffled.

Shape legend: R rows of a source, N rows that may be drawn, M rows of the mixture, P of a piece.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING

import numpy as np

from vox_core.api.rows import (
    KEPT,
    NO_VALUE,
    CheckedFile,
    RowFacts,
    changed,
    duplicates,
    filtered,
    raw_lines,
    readable,
    value_counts,
)
from vox_core.contract import DataPolicy, Ints
from vox_data.recipe import MixSource

if TYPE_CHECKING:
    from numpy.typing import NDArray


REASONS = (
    "faulty", "other lane", "other category", "low rating", "duplicate", "over the cap",
    "not drawn",
)  # fmt: skip
"""Why a row of a source is not in the mixture; the first that applies."""
CHOICES = ("other lane", "lane", "lanes"), ("other category", "category", "categories")
"""Reason, attribute of rows, and the key of a source that names the values to take."""
PIECE_BYTES, PIECE_ROWS = 1 << 26, 1 << 18
_READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The rows of a source that may be drawn, in the order of the file.

    Args:
        facts: of all well-formed rows of the file.
        reasons: why the other rows may not be drawn.
        others: reason -> values of the rows that it leaves out, and how many rows have each.
        row_N: int64, index of each row in `facts`.
    """

    file: CheckedFile
    facts: RowFacts
    reasons: Counter[str]
    others: Mapping[str, Counter[str]]
    row_N: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_N)

    @property
    def rows(self) -> int:
        """Of the file, malformed ones too."""
        return self.facts.rows + self.facts.malformed

    def only(self, kept_N: NDArray[np.bool_], reason: str) -> Pool:
        """Without the others, which are counted under `reason`."""
        reasons = self.reasons + Counter({reason: int((~kept_N).sum())})
        return replace(self, reasons=reasons, row_N=self.row_N[kept_N])


def pool_of(file: CheckedFile, source: MixSource) -> Pool:
    """The rows of a checked source that pass its filters."""
    assert file.facts is not None
    facts = _with_lane(file.facts, source.lane)
    reasons = Counter({"faulty": facts.malformed})
    pool = Pool(file, facts, +reasons, {}, np.arange(facts.rows))
    for reason, name, key in CHOICES:
        if wanted := getattr(source, key):
            kept_N = filtered(facts, DataPolicy(**{name: wanted}))[pool.row_N] == KEPT
            left_out = value_counts([facts], name, pool.row_N[~kept_N])
            pool = replace(pool.only(kept_N, reason), others={**pool.others, reason: left_out})
    if source.min_rating is not None:
        policy = DataPolicy(min_rating=source.min_rating, unrated="drop")
        pool = pool.only(filtered(facts, policy)[pool.row_N] == KEPT, "low rating")
    return pool


def _with_lane(facts: RowFacts, lane: str | None) -> RowFacts:
    """Rows that name no lane are in the source's."""
    if lane is None:
        return facts
    names = [*facts.names["lane"], lane]
    rows_R = facts.rows_R.copy()
    rows_R["lane"][rows_R["lane"] == NO_VALUE] = len(names) - 1
    return replace(facts, rows_R=rows_R, names={**facts.names, "lane": names})


def without_duplicates(pools: Sequence[Pool]) -> list[Pool]:
    """The rows of each pool that say what no row before them says, in it or in an earlier pool."""
    whole_N2 = np.concatenate([pool.facts.rows_R["whole"][pool.row_N] for pool in pools])
    kept_N = np.ones(len(whole_N2), np.bool_)
    kept_N[duplicates(whole_N2)[:, 0]] = False
    ends = np.cumsum([len(pool) for pool in pools])[:-1]
    parts = np.split(kept_N, ends)
    return [pool.only(part, "duplicate") for pool, part in zip(pools, parts, strict=True)]


# --- bytes ----------------------------------------------------------------------------------------


def pieces(
    pools: Sequence[Pool], lanes: Sequence[str | None], sources_M: Ints, rows_M: Ints
) -> Iterator[bytes]:
    """The mixture in pieces of whole lines.

    Args:
        lanes: per pool, the lane of rows that name none.
        sources_M, rows_M: the mixture, as `mix_draw.mixed` gives it.

    Raises:
        DataError: D001, a source cannot be read.
    """
    places = [_places(pool) for pool in pools]
    with ExitStack() as stack:
        opened = [_opened(pool, stack) for pool in pools]
        for start, stop in _extents(places, sources_M, rows_M):
            lines = [b""] * (stop - start)
            for number, file in enumerate(opened):
                at_P = np.flatnonzero(sources_M[start:stop] == number)
                chosen_P = rows_M[start:stop][at_P]
                order_P = np.argsort(chosen_P, kind="stable")
                at_P, chosen_P = at_P[order_P], chosen_P[order_P]
                with readable(pools[number].file.path):
                    rows = _rows_at(file, *(column_N[chosen_P] for column_N in places[number]))
                    for at, row in zip(at_P.tolist(), rows, strict=True):
                        lines[at] = row if lanes[number] is None else _laned(row, lanes[number])
            yield b"\n".join([*lines, b""])


def _places(pool: Pool) -> tuple[Ints, Ints]:
    """Return each row's offset and length in its file in bytes, without surrounding whitespace."""
    wanted = set(pool.facts.rows_R["line"][pool.row_N].tolist())
    found: list[tuple[int, int]] = []
    with readable(pool.file.path):
        for number, offset, line in raw_lines(pool.file.lines):
            if line is not None and number in wanted:
                start = offset + len(line) - len(line.lstrip())
                found.append((start, len(line.strip())))
    if len(found) != len(pool):
        raise changed(pool.file.path)
    starts_N, sizes_N = np.array(found, np.int64).reshape(-1, 2).T
    return starts_N, sizes_N


def _opened(pool: Pool, stack: ExitStack) -> IO[bytes]:
    with readable(pool.file.path):
        return stack.enter_context(pool.file.lines.open("rb", buffering=0))


def _extents(
    places: Sequence[tuple[Ints, Ints]], sources_M: Ints, rows_M: Ints
) -> Iterator[tuple[int, int]]:
    sizes_M = np.zeros(len(rows_M), np.int64)
    for number, (_, sizes_N) in enumerate(places):
        of_it_M = sources_M == number
        sizes_M[of_it_M] = sizes_N[rows_M[of_it_M]]
    ends_M, start = np.cumsum(sizes_M), 0
    while start < len(rows_M):
        before = int(ends_M[start - 1]) if start else 0
        stop = int(np.searchsorted(ends_M, before + PIECE_BYTES, "right"))
        stop = min(max(stop, start + 1), start + PIECE_ROWS)
        yield start, stop
        start = stop


def _rows_at(file: IO[bytes], starts_P: Ints, sizes_P: Ints) -> Iterator[bytes]:
    """Rows of a file, in the order in which they lie in it."""
    block, first, end = b"", 0, 0
    for start, size in zip(starts_P.tolist(), sizes_P.tolist(), strict=True):
        if start + size > end:
            file.seek(start)
            block, first = _read(file, max(size, _READ_BYTES)), start
            end = first + len(block)
        yield block[start - first : start - first + size]


def _read(file: IO[bytes], size: int) -> bytes:
    """Up to `size` bytes; fewer only at the end of the file."""
    parts: list[bytes] = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _laned(row: bytes, lane: str | None) -> bytes:
    """A row with `lane`, unless it names its own. The added key is its last; a row that has an
    empty lane is written anew, because a second key of that name would be a fault."""
    fields = json.loads(row)
    if fields.get("lane"):
        return row
    if "lane" in fields:
        return json.dumps({**fields, "lane": lane}).encode()
    return row[:-1].rstrip() + f', "lane": {json.dumps(lane)}}}'.encode()
