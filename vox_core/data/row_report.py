"""Rows in and out, per file and reason, for people and programs.

Malformed rows and duplicates are named, each with its line; rows that a filter left out are
counted. Messages name `SHOWN` of each kind; `Report.listed` has all, with up to `LISTED`
duplicates.

Shape legend: N training rows of all files, R of one, P pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vox_core.data.checked import CheckedFile, CheckedRows
from vox_core.data.row_facts import HELD_OUT, KEPT, MALFORMED, NAMES, RowFacts, overlap

if TYPE_CHECKING:
    from vox_core.data.row_facts import Codes, Pairs

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
        left_out: reason -> rows (`row_facts.REASONS`); malformed rows are not among them.
        malformed: kind of fault -> rows that were skipped.
    """

    path: Path
    side: Side
    rows: int
    used: int
    held_out: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    malformed: Mapping[str, int] = field(default_factory=dict)

    @property
    def out(self) -> dict[str, int]:
        """Reason -> rows that nobody sees."""
        bad = sum(self.malformed.values())
        return {**({"malformed": bad} if bad else {}), **self.left_out}

    def __str__(self) -> str:
        told = f"{self.path}: {self.used:,} of {self.rows:,} rows are used"
        if self.held_out:
            told += f", {self.held_out:,} are held out"
        out = ", ".join(f"{count:,} {reason}" for reason, count in self.out.items())
        return f"{told}; left out: {out}" if out else told


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}"

    def to_json(self) -> dict[str, Any]:
        return {"file": str(self.path), "line": self.line}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that was left out, and why.

    Args:
        reason: malformed, duplicate or near duplicate.
        detail: what is wrong with a malformed row.
        of: the row that stays in place of a duplicate.
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
class Leak:
    """A held-out row that is trained on as well.

    Args:
        near: it says nearly the same, not the same.
    """

    held_out: Place
    trained: Place
    near: bool = False

    def __str__(self) -> str:
        return f"{self.held_out} says {'nearly ' if self.near else ''}what {self.trained} says"

    def to_json(self) -> dict[str, Any]:
        sides = {"held_out": self.held_out.to_json(), "trained": self.trained.to_json()}
        return {**sides, "near": self.near}


@dataclass(frozen=True, slots=True)
class Report:
    """Of all files.

    Args:
        malformed: every malformed row.
        duplicates: the first of those that were left out; the counts have them all.
        leaks: the first of `leaked`.
    """

    files: Sequence[FileRows]
    malformed: Sequence[Skipped] = ()
    duplicates: Sequence[Skipped] = ()
    leaks: Sequence[Leak] = ()
    leaked: int = 0

    @property
    def listed(self) -> Iterator[Skipped]:
        """The rows of `skipped_rows.jsonl`."""
        yield from self.malformed
        yield from self.duplicates

    def left_out(self, side: Side) -> dict[str, int]:
        """Reason -> rows of a side that nobody sees."""
        counts: Counter[str] = Counter()
        for file in self.files:
            counts.update(file.out if file.side == side else {})
        return dict(counts)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `preflight.json`."""
        return {
            "files": [
                {
                    "file": str(file.path),
                    "side": file.side,
                    "rows": file.rows,
                    "used": file.used,
                    "held_out": file.held_out,
                    "left_out": file.out,
                    "malformed": dict(file.malformed),
                }
                for file in self.files
            ],
            "duplicates": [each.to_json() for each in self.duplicates[:IN_JSON]],
            "leaked": self.leaked,
            "leaks": [each.to_json() for each in self.leaks[:IN_JSON]],
        }

    def told(self) -> Iterator[str]:
        """What was chosen, in words; nothing where every row is used."""
        yield from (str(file) for file in self.files if file.used < file.rows)
        yield from _some(
            [*map(str, self.duplicates)],
            sum(file.left_out.get(each, 0) for file in self.files for each in _DUPLICATES),
            ("duplicate is left out", "duplicates are left out"),
        )

    def warnings(self) -> Iterator[str]:
        """What somebody should look at."""
        bad: Counter[str] = Counter()
        for file in self.files:
            bad.update(file.malformed)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in bad.most_common())
        rows = [*map(str, self.malformed)]
        what = f"malformed row is skipped ({kinds})", f"malformed rows are skipped ({kinds})"
        yield from _some(rows, bad.total(), what)
        what = "held-out row is trained on, too", "held-out rows are trained on, too"
        yield from _some([*map(str, self.leaks)], self.leaked, what)


def _some(rows: Sequence[str], count: int, what: tuple[str, str]) -> Iterator[str]:
    """A line that names the first few; `what` of one, and of several."""
    if count:
        more = f"; and {count - SHOWN:,} more" if count > SHOWN else ""
        yield f"{count:,} {what[count > 1]}: {'; '.join(rows[:SHOWN])}{more}"


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
    leaks = [*_leaks(train, valid, code_N, near)]
    codes = train.parts(code_N)
    pairs = pairs_P2[np.argsort(pairs_P2[:, 0], kind="stable")][:LISTED]
    return Report(
        files=[
            *(_file_rows(*each) for each in zip(train.files, train.facts, codes, strict=True)),
            *(_valid_rows(*each) for each in zip(valid.files, valid.facts, strict=True)),
        ],
        malformed=[*chain(_malformed(train), _malformed(valid))],
        duplicates=[
            Skipped(Place(*train.place(row)), NAMES[code_N[row]], of=Place(*train.place(stays)))
            for row, stays in pairs.tolist()
        ],
        leaks=leaks[:LISTED],
        leaked=len(leaks),
    )


def _leaks(
    train: CheckedRows, valid: CheckedRows, code_N: Codes, near: Mapping[int, int]
) -> Iterator[Leak]:
    used_K = np.flatnonzero(code_N == KEPT)
    pairs_P2 = overlap(train.digests("said_R2")[used_K], valid.digests("said_R2"))
    exact = {row: int(used_K[number]) for row, number in pairs_P2.tolist()}
    for row, other in sorted({**near, **exact}.items()):
        places = Place(*valid.place(row)), Place(*train.place(other))
        yield Leak(*places, near=row not in exact)


def _file_rows(file: CheckedFile, facts: RowFacts, code_R: Codes) -> FileRows:
    counts = np.bincount(code_R, minlength=len(NAMES)).tolist()
    return FileRows(
        file.path,
        "train",
        facts.rows + facts.malformed,
        used=counts[KEPT],
        held_out=counts[HELD_OUT],
        left_out={NAMES[c]: counts[c] for c in range(HELD_OUT + 1, len(NAMES)) if counts[c]},
        malformed=_kinds(facts),
    )


def _valid_rows(file: CheckedFile, facts: RowFacts) -> FileRows:
    rows = facts.rows + facts.malformed
    return FileRows(file.path, "valid", rows, used=facts.rows, malformed=_kinds(facts))


def _kinds(facts: RowFacts) -> Counter[str]:
    """Code -> malformed lines, each by its first fault."""
    first = dict(reversed(facts.faults))
    return Counter(fault.code for fault in first.values())


def _malformed(rows: CheckedRows) -> Iterator[Skipped]:
    for file, facts in zip(rows.files, rows.facts, strict=True):
        by_line: dict[int, list[str]] = {}
        for line, fault in facts.faults:
            by_line.setdefault(line, []).append(str(fault))
        for line, texts in by_line.items():
            yield Skipped(Place(file.path, line), MALFORMED, "; ".join(texts))
