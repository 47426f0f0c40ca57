"""One look at every row of a source: is it a row, is it wanted, and where does it lie.

Of a row are kept its place in the file, its size and a hash of its bytes: 21 bytes, whatever its
length. What a row must be is the business of the same parser that `vox train` reads rows with.

Shape legend: N rows of a source that may be taken.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from vox_core.data.faults import RowError
from vox_core.data.jsonl import BOM, MAX_LINE_BYTES, file_faults, parse_object
from vox_core.data.records import Placed, placed, readable
from vox_core.data.rows import parse_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.contract import Ints

Reason: TypeAlias = Literal[
    "faulty", "other lane", "other category", "low rating", "duplicate", "over the cap", "not drawn"
]
REASONS: tuple[Reason, ...] = (
    "faulty", "other lane", "other category", "low rating", "duplicate", "over the cap",
    "not drawn",
)  # fmt: skip
AS_IT_IS, WITHOUT_LANE, EMPTY_LANE = 0, 1, 2
"""What has to be done to a row so that it has a lane."""

_LEFT_OUT = 255

_LONGEST, _MOST_VALUES = 200, 10_000
"""Characters of a field's value that is counted, and how many are told apart."""

BLOCK_BYTES = 1 << 20
Tell: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows of a source may be taken.

    Args:
        lane: of the rows that name none; None leaves them without.
        lanes, categories: those wanted; empty for all. A row that names none is not wanted.
        min_rating: the lowest rating wanted; then a row without a rating is not.
    """

    lane: str | None = None
    lanes: frozenset[str] = frozenset()
    categories: frozenset[str] = frozenset()
    min_rating: float | None = None

    def refused(self, fields: Mapping[str, object]) -> Reason | None:
        """Why a row is not wanted."""
        if self.lanes and self.said("other lane", fields) not in self.lanes:
            return "other lane"
        if self.categories and self.said("other category", fields) not in self.categories:
            return "other category"
        if self.min_rating is not None and not _rating(fields) >= self.min_rating:
            return "low rating"
        return None

    def said(self, reason: Reason, fields: Mapping[str, object]) -> str | None:
        """What a row has where it would need another lane or category."""
        if reason == "other lane":
            return _word(fields.get("lane") or self.lane)
        return _word(fields.get("category")) if reason == "other category" else None


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _rating(fields: Mapping[str, object]) -> float:
    """NaN where there is none."""
    rating = fields.get("rating")
    if isinstance(rating, bool) or not isinstance(rating, int | float):
        return math.nan
    return rating


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The rows of a source that may be taken, in the order of the file.

    Args:
        rows: of the file, faulty ones too.
        reasons: why the others may not.
        starts_N: int64, where each begins in the file.
        sizes_N: int32, its bytes without whitespace around it.
        marks_N: int64, Python's hash of these bytes, which is another in each process: rows with
            other marks are not the same. Zeros if nobody wanted them.
        lanes_N: uint8, `AS_IT_IS`, `WITHOUT_LANE` or `EMPTY_LANE`.
        others: of the rows with another lane or category, which they have -> rows.
    """

    path: Path
    rows: int
    reasons: Counter[Reason]
    starts_N: NDArray[np.int64]
    sizes_N: NDArray[np.int32]
    marks_N: NDArray[np.int64]
    lanes_N: NDArray[np.uint8]
    others: Mapping[Reason, Counter[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.starts_N)

    def only(self, kept_N: NDArray[np.bool_], reason: Reason) -> Pool:
        """Those of them that are kept; the others are counted under `reason`."""
        reasons = self.reasons + Counter({reason: int((~kept_N).sum())})
        return replace(
            self,
            reasons=reasons,
            starts_N=self.starts_N[kept_N],
            sizes_N=self.sizes_N[kept_N],
            marks_N=self.marks_N[kept_N],
            lanes_N=self.lanes_N[kept_N],
        )


def scan(
    path: Path,
    wanted: Wanted,
    faults: list[Placed],
    *,
    marks: bool,
    tell: Tell,
    shown: Path | None = None,
) -> Pool:
    """Look at every row of a JSONL file.

    Args:
        faults: gets what is wrong with each row that is faulty.
        marks: tell rows apart by their bytes.
        tell: called with the bytes looked at since the last call, a block at a time.
        shown: the file whose rows these are, if it is no JSONL itself.

    Raises:
        DataError: D001, it cannot be read.
    """
    shown = shown or path
    found = _Found(path, wanted, faults, marks, shown)
    with readable(shown):
        if wrong := file_faults(path):
            faults += placed(shown, 0, wrong)
            return found.pool()
        with path.open("rb") as file:
            for number, start, data in _blocks(file):
                found.look_at(number, start, data)
                tell(len(data))
    return found.pool()


class _Found:
    """What was found of a source so far.

    What is done for each row is done for all rows of a block together where that is quicker.
    """

    def __init__(
        self, path: Path, wanted: Wanted, faults: list[Placed], marks: bool, shown: Path
    ) -> None:
        self._shown = shown
        self._path, self._wanted, self._faults, self._marks = path, wanted, faults, marks
        self._rows = 0
        self._reasons: Counter[Reason] = Counter()
        self._others: defaultdict[Reason, Counter[str]] = defaultdict(Counter)
        self._columns: list[tuple[Ints, Ints, NDArray[np.uint8]]] = []
        self._marks_of: list[Ints] = []

    def look_at(self, number: int, start: int, data: bytes) -> None:
        """Look at the lines of `data`, which begin `start` bytes into the file; `number` is that of
        the first."""
        lines = data.split(b"\n")
        rows = [line.strip() for line in lines]
        self._rows += sum(map(bool, rows))
        states = np.frombuffer(bytes(map(self._state, rows, count(number))), np.uint8)
        sizes = np.fromiter(map(len, rows), np.int64, len(rows))
        starts = start + _starts(lines)
        if sizes.sum() != sum(map(len, lines)):  # whitespace, which is rare
            starts += np.array([len(line) - len(line.lstrip()) for line in lines], np.int64)
        kept = states != _LEFT_OUT
        self._columns.append((starts[kept], sizes[kept], states[kept]))
        if self._marks:
            chosen = rows if kept.all() else [rows[at] for at in np.flatnonzero(kept).tolist()]
            self._marks_of.append(np.fromiter(map(hash, chosen), np.int64, len(chosen)))

    def _state(self, row: bytes, line: int) -> int:
        """What is to be done to a row: its lane, or that it is left out."""
        if not row:
            return _LEFT_OUT
        try:
            fields = _fields(row)
        except RowError as fault:
            self._reasons["faulty"] += 1
            self._faults += placed(self._shown, line, fault.faults)
            return _LEFT_OUT
        if reason := self._wanted.refused(fields):
            self._reasons[reason] += 1
            self._note(reason, self._wanted.said(reason, fields))
            return _LEFT_OUT
        return _lane_of(fields) if self._wanted.lane is not None else AS_IT_IS

    def _note(self, reason: Reason, value: str | None) -> None:
        known = self._others[reason]
        if value and len(value) <= _LONGEST and (value in known or len(known) < _MOST_VALUES):
            known[value] += 1

    def pool(self) -> Pool:
        nothing = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8))
        starts_N, sizes_N, lanes_N = (
            np.concatenate(column) for column in zip(nothing, *self._columns, strict=True)
        )
        marks_N = np.concatenate([nothing[0], *self._marks_of])
        return Pool(
            self._path,
            self._rows,
            self._reasons,
            starts_N,
            sizes_N.astype(np.int32),
            marks_N if self._marks else np.zeros(len(starts_N), np.int64),
            lanes_N,
            self._others,
        )


def _starts(lines: Sequence[bytes]) -> Ints:
    """Where each line begins, of lines with one byte between them."""
    whole = np.fromiter(map(len, lines), np.int64, len(lines)) + 1
    return np.cumsum(whole) - whole


def _fields(row: bytes) -> Mapping[str, object]:
    """The fields of a row that can be trained.

    Raises:
        RowError: it is none.
    """
    fields = parse_object(row if len(row) <= MAX_LINE_BYTES else None)
    parse_row(fields)
    return fields


def _lane_of(fields: Mapping[str, object]) -> int:
    if "lane" not in fields:
        return WITHOUT_LANE
    return EMPTY_LANE if fields["lane"] in (None, "") else AS_IT_IS


def _blocks(file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """(number of the first line, from 1; place in the file; whole lines).

    A byte order mark at the start is dropped. Of a line that is too long no more is read than shows
    that it is.
    """
    number, start = 1, len(BOM) if file.read(len(BOM)) == BOM else 0
    file.seek(start)
    while data := file.read(BLOCK_BYTES):
        skipped = 0
        if not data.endswith(b"\n"):
            data += file.readline(MAX_LINE_BYTES + 1)
            while not data.endswith(b"\n") and (part := file.readline(MAX_LINE_BYTES)):
                skipped += len(part)
                if part.endswith(b"\n"):
                    break
        yield number, start, data
        number += data.count(b"\n") + (skipped > 0)
        start += len(data) + skipped
