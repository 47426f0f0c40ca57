"""One look at every row of a source: is it a row, is it wanted, and where does it lie.

Of a row are kept its place in the file, its size and the hash of its bytes: 29 bytes, whatever its
length. What a row must be is the business of the same parser that `vox train` reads rows with.

Shape legend: N rows of a source that may be taken.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from vox_core.data.jsonl import BOM, MAX_LINE_BYTES, RowError, other_format, parse_object
from vox_core.data.records import readable
from vox_core.data.rows import parse_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

Reason: TypeAlias = Literal[
    "faulty", "other lane", "other category", "low rating", "duplicate", "over the cap", "not drawn"
]
REASONS: tuple[Reason, ...] = (
    "faulty", "other lane", "other category", "low rating", "duplicate", "over the cap",
    "not drawn",
)  # fmt: skip
AS_IT_IS, WITHOUT_LANE, EMPTY_LANE = 0, 1, 2
"""What has to be done to a row so that it has a lane."""

_TOLD_EVERY = 1 << 24
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

    @property
    def all(self) -> bool:
        return not self.lanes and not self.categories and self.min_rating is None

    def refused(self, fields: Mapping[str, object]) -> Reason | None:
        """Why a row is not wanted."""
        if self.lanes and (fields.get("lane") or self.lane) not in self.lanes:
            return "other lane"
        if self.categories and fields.get("category") not in self.categories:
            return "other category"
        rating = fields.get("rating")
        rated = isinstance(rating, int | float) and not isinstance(rating, bool)
        if self.min_rating is not None and not (rated and rating >= self.min_rating):  # type: ignore[operator]
            return "low rating"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The rows of a source that may be taken, in the order of the file.

    Args:
        rows: of the file, faulty ones too.
        reasons: why the others may not.
        starts_N: int64, where each begins in the file.
        sizes_N: int32, its bytes without whitespace around it.
        marks_N2: uint64, 16 bytes of BLAKE2b of these bytes; rows of zeros if nobody wanted them.
        lanes_N: uint8, `AS_IT_IS`, `WITHOUT_LANE` or `EMPTY_LANE`.
    """

    path: Path
    rows: int
    reasons: Counter[Reason]
    starts_N: NDArray[np.int64]
    sizes_N: NDArray[np.int32]
    marks_N2: NDArray[np.uint64]
    lanes_N: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.starts_N)

    def only(self, kept_N: NDArray[np.bool_], reason: Reason) -> Pool:
        """Those of them that are kept; the others are counted under `reason`."""
        reasons = self.reasons + Counter({reason: int((~kept_N).sum())})
        columns = (self.starts_N, self.sizes_N, self.marks_N2, self.lanes_N)
        return Pool(self.path, self.rows, reasons, *(column[kept_N] for column in columns))


def scan(path: Path, wanted: Wanted, faults: list[str], *, marks: bool, tell: Tell) -> Pool:
    """Look at every row of a JSONL file.

    Args:
        faults: gets what is wrong with each row that is faulty.
        marks: tell rows apart by their bytes.
        tell: called with the bytes looked at since the last call, now and then.

    Raises:
        DataError: D001, it cannot be read.
    """
    found = _Found(path, wanted, faults, marks)
    with readable(path):
        if other := other_format(path):
            faults.append(f"{path}: {other}")
            return found.pool()
        with path.open("rb") as file:
            found.all_of(file, tell)
    return found.pool()


@dataclass(slots=True)
class _Found:
    path: Path
    wanted: Wanted
    faults: list[str]
    marks: bool
    rows: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    starts: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("i"))
    lanes: bytearray = field(default_factory=bytearray)
    digests: bytearray = field(default_factory=bytearray)

    def all_of(self, file: IO[bytes], tell: Tell) -> None:
        told = 0
        for number, start, line in _lines(file):
            self.rows += 1
            if start - told >= _TOLD_EVERY:
                tell(start - told)
                told = start
            try:
                fields = parse_object(line)
                parse_row(fields)
            except RowError as fault:
                self.reasons["faulty"] += 1
                self.faults += (f"{self.path}, line {number}: {text}" for text in fault.faults)
                continue
            assert line is not None, "it was parsed"
            self._take(fields, start, line)
        tell(file.tell() - told)

    def _take(self, fields: dict[str, object], start: int, line: bytes) -> None:
        wanted, row = self.wanted, line.rstrip()
        if not wanted.all and (reason := wanted.refused(fields)):
            self.reasons[reason] += 1
            return
        before = 0 if row[0] == 0x7B else row.index(b"{")  # whitespace
        self.starts.append(start + before)
        self.sizes.append(len(row) - before)
        self.lanes.append(_lane_of(fields) if wanted.lane else AS_IT_IS)
        if self.marks:
            self.digests += hashlib.blake2b(row[before:], digest_size=16).digest()

    def pool(self) -> Pool:
        rows = len(self.starts)
        digests = bytes(self.digests) if self.marks else bytes(16 * rows)
        return Pool(
            self.path,
            self.rows,
            self.reasons,
            np.array(self.starts, np.int64),
            np.array(self.sizes, np.int32),
            np.frombuffer(digests, np.uint64).reshape(-1, 2),
            np.frombuffer(bytes(self.lanes), np.uint8),
        )


def _lane_of(fields: Mapping[str, object]) -> int:
    if "lane" not in fields:
        return WITHOUT_LANE
    return EMPTY_LANE if fields["lane"] in (None, "") else AS_IT_IS


def _lines(file: IO[bytes]) -> Iterator[tuple[int, int, bytes | None]]:
    """(number from 1, place in the file, content) of each line that is not blank; None for the
    content of one that is too long. A byte order mark at the start is dropped."""
    number = at = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        start, at = at, at + len(line)
        if number == 1 and line.startswith(BOM):
            line, start = line[len(BOM) :], len(BOM)
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (part := file.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
                at += len(part)
            at += len(part)
            yield number, start, None
        elif not line.isspace():
            yield number, start, line
