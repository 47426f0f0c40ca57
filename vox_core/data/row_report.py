"""Rows in and out, per file and reason, for people and programs.

Malformed rows and duplicates are named, each with its line; rows that a filter left out are
counted. Messages name `SHOWN` of each kind; `Report.listed` has all, with up to `LISTED`
duplicates.

Shape legend: N training rows of all files, K of them that are used, R of one, V validation rows, P
pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from vox_core.data.checked import CheckedRows
from vox_core.data.formats import place_of
from vox_core.data.row_facts import HELD_OUT, KEPT, MALFORMED, NAMES, duplicates

if TYPE_CHECKING:
    from vox_core.data.row_facts import Codes, Digests, Pairs

SHOWN = 3
IN_JSON = 20
LISTED = 10_000

Side = Literal["train", "valid"]
_NEAR = "near duplicate"
_DUPLICATES = ("duplicate", _NEAR)


@dataclass(frozen=True, slots=True)
class FileRows:
    """What became of the rows of a file.

    Args:
        rows: all of them, malformed ones too.
        used: on the file's own side.
        held_out: by --valid-share.
        left_out: malformed, or another reason (`row_facts.REASONS`) -> rows.
        malformed: kind of fault -> rows that were skipped.
    """

    file: str
    side: Side
    rows: int
    used: int
    held_out: int
    left_out: dict[str, int]
    malformed: dict[str, int]

    def __str__(self) -> str:
        told = f"{self.file}: {self.used:,} of {self.rows:,} rows are used"
        if self.held_out:
            told += f", {self.held_out:,} are held out"
        out = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"{told}; left out: {out}" if out else told


class Place(NamedTuple):
    """A line of a file."""

    path: Path
    line: int

    def __str__(self) -> str:
        return place_of(*self)

    def to_json(self) -> dict[str, Any]:
        return {"file": str(self.path), "line": self.line}


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row that was left out, or a validation row that is trained on as well.

    Args:
        reason: malformed, duplicate or near duplicate.
        detail: what is wrong with a malformed row.
        of: the row that says the same.
    """

    place: Place
    reason: str
    detail: str | None = None
    of: Place | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **self.place.to_json(),
            "reason": self.reason,
            **({"detail": self.detail} if self.detail else {}),
            **({"of": self.of.to_json()} if self.of else {}),
        }

    def __str__(self) -> str:
        if self.of is None:
            return f"{self.place}: {self.detail}"
        return f"{self.place} says {'nearly ' if self.reason == _NEAR else ''}what {self.of} says"


@dataclass(frozen=True, slots=True)
class Report:
    """Of all files.

    Args:
        malformed: every malformed row.
        duplicates: the first of those that were left out; the counts have them all.
        leaks: validation rows that are trained on as well, the first of `leaked`.
    """

    files: Sequence[FileRows]
    malformed: Sequence[NamedRow] = ()
    duplicates: Sequence[NamedRow] = ()
    leaks: Sequence[NamedRow] = ()
    leaked: int = 0

    @property
    def listed(self) -> list[NamedRow]:
        """The rows of `skipped_rows.jsonl`."""
        return [*self.malformed, *self.duplicates]

    def left_out(self, side: Side) -> dict[str, int]:
        """Reason -> rows of a side that nobody sees."""
        counts: Counter[str] = Counter()
        for file in self.files:
            counts.update(file.left_out if file.side == side else {})
        return dict(counts)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `preflight.json`."""
        return {
            "files": [asdict(file) for file in self.files],
            "duplicates": [each.to_json() for each in self.duplicates[:IN_JSON]],
            "leaked": self.leaked,
            "leaks": [each.to_json() for each in self.leaks[:IN_JSON]],
        }

    def told(self) -> Iterator[str]:
        """What was chosen, in words; nothing where every row is used."""
        yield from (str(file) for file in self.files if file.used < file.rows)
        count = sum(file.left_out.get(each, 0) for file in self.files for each in _DUPLICATES)
        yield from _some(self.duplicates, count, "duplicate is left out", "duplicates are left out")

    def warnings(self) -> Iterator[str]:
        """What somebody should look at."""
        bad: Counter[str] = Counter()
        for file in self.files:
            bad.update(file.malformed)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in bad.most_common())
        one, several = "malformed row is skipped", "malformed rows are skipped"
        yield from _some(self.malformed, bad.total(), f"{one} ({kinds})", f"{several} ({kinds})")
        one, several = "held-out row is trained on, too", "held-out rows are trained on, too"
        yield from _some(self.leaks, self.leaked, one, several)


def _some(rows: Sequence[NamedRow], count: int, one: str, several: str) -> Iterator[str]:
    """A line that names the first few."""
    if count:
        more = f"; and {count - SHOWN:,} more" if count > SHOWN else ""
        named = "; ".join(map(str, rows[:SHOWN]))
        yield f"{count:,} {several if count > 1 else one}: {named}{more}"


def report_of(
    train: CheckedRows,
    valid: CheckedRows,
    code_N: Codes,
    pairs_P2: Pairs,
    near: Mapping[int, int],
) -> Report:
    """What became of every row.

    Args:
        code_N: of each training row.
        pairs_P2: duplicates, each with the row that stays.
        near: validation row -> training row that says nearly the same.
    """
    used_K = np.flatnonzero(code_N == KEPT)
    exact_P2 = overlap(train.digests("said_R2")[used_K], valid.digests("said_R2"))
    exact = {row: int(used_K[number]) for row, number in exact_P2.tolist()}
    leaks = sorted({**near, **exact}.items())
    pairs = pairs_P2[np.argsort(pairs_P2[:, 0], kind="stable")][:LISTED].tolist()
    code_V = np.full(len(valid), KEPT, np.uint8)
    return Report(
        files=[*_file_rows("train", train, code_N), *_file_rows("valid", valid, code_V)],
        malformed=[*_malformed(train), *_malformed(valid)],
        duplicates=[
            NamedRow(Place(*train.place(row)), NAMES[code_N[row]], of=Place(*train.place(stays)))
            for row, stays in pairs
        ],
        leaks=[
            NamedRow(
                Place(*valid.place(row)),
                "duplicate" if row in exact else _NEAR,
                of=Place(*train.place(other)),
            )
            for row, other in leaks[:LISTED]
        ],
        leaked=len(leaks),
    )


def overlap(said_N2: Digests, said_V2: Digests) -> Pairs:
    """Validation rows that also occur in the training data: int64 (P, 2), validation row and the
    first training row that says the same."""
    pairs_P2 = duplicates(np.concatenate([said_N2, said_V2]))
    count = len(said_N2)
    pairs_P2 = pairs_P2[(pairs_P2[:, 0] >= count) & (pairs_P2[:, 1] < count)]
    pairs_P2[:, 0] -= count
    return pairs_P2


def _file_rows(side: Side, rows: CheckedRows, code_N: Codes) -> Iterator[FileRows]:
    for file, facts, code_R in zip(rows.files, rows.facts, rows.parts(code_N), strict=True):
        counts = dict(zip(NAMES, np.bincount(code_R, minlength=len(NAMES)).tolist(), strict=True))
        used, held_out = counts.pop(NAMES[KEPT]), counts.pop(NAMES[HELD_OUT])
        first = dict(reversed(facts.faults)).items()  # of each line
        out = {MALFORMED: facts.malformed, **counts}
        yield FileRows(
            str(file.path),
            side,
            facts.rows + facts.malformed,
            used,
            held_out,
            left_out={reason: count for reason, count in out.items() if count},
            malformed=dict(Counter(fault.code for _, fault in first)),
        )


def _malformed(rows: CheckedRows) -> Iterator[NamedRow]:
    for file, facts in zip(rows.files, rows.facts, strict=True):
        for line, faults in groupby(facts.faults, key=itemgetter(0)):
            detail = "; ".join(str(fault) for _, fault in faults)
            yield NamedRow(Place(file.path, line), MALFORMED, detail)
