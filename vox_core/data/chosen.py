"""Data files and a policy -> which of their rows are trained on, and which are held out.

Rows of files that were named for validation are all used, whatever the policy says of training
rows, so that runs under different policies are judged by the same rows; malformed ones are skipped
there, too. Of rows that say the same the first stays, in the order of the files. Near duplicates
are searched by a plugin (point `dedup`, hook `vox_near_duplicates`); the cache keeps the result.

The report names malformed rows and duplicates, each with its line, and counts rows that a filter
left out. Messages name `SHOWN` of each kind; `Report.listed` has all, with up to `LISTED`
duplicates.

Shape legend: N training rows, K of them that are compared or used, R rows of a file, V validation
rows, P pairs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from math import ceil
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vox_core.cache import CACHE_VERSION, cached
from vox_core.contract import DataPolicy
from vox_core.data.checked import CheckedFile, CheckedRows, check_files
from vox_core.data.fields import NO_FIELDS, FieldMap
from vox_core.data.records import Progress, RowPlace, listed
from vox_core.data.row_facts import (
    CODES,
    FILTERS,
    HELD_OUT,
    KEPT,
    MALFORMED,
    NAMES,
    TORN,
    duplicates,
    filtered,
    held_out,
    read_arrays,
    value_counts,
)
from vox_core.data.rows import Answers
from vox_core.errors import BackendError, ConfigError, DataError
from vox_core.host.load import call_hook, provider, wrong_result
from vox_core.text import nearest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.data.row_facts import Codes, Digests, Pairs
    from vox_core.host.discover import Found

_NEAR_FILE = "pairs.npz"

_LONGEST, _SHOWN, _NEAREST = 60, 10, 1000
"""Characters of a value in a message; values listed; values searched for the one that is meant."""
SHOWN = 3
IN_JSON = 20
LISTED = 10_000

Side = Literal["train", "valid"]
_NEAR = "near duplicate"
_DUPLICATES = ("duplicate", _NEAR)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Files with the rows that are used of them."""

    train: list[CheckedFile]
    valid: list[CheckedFile]
    report: Report


def choose_rows(
    train: Sequence[Path],
    valid: Sequence[Path],
    policy: DataPolicy,
    fields: FieldMap = NO_FIELDS,
    answers: Answers = "some",
    progress: Progress | None = None,
) -> Chosen:
    """Check the files, and choose among their rows.

    Args:
        answers: as for `parse_row`.

    Raises:
        DataError: D001, D002, D003; D020, too many rows are malformed; D021, a filter names what no
            row has; D022, rows have no rating; D023, no row is left, or none is held out.
        ConfigError: C009, no plugin finds near duplicates.
    """
    finder = _near_finder() if policy.dedup == "near" else None  # before anything is read
    skip = policy.malformed_rows == "skip"
    checked = check_files([*train, *valid], fields, skip=skip, answers=answers, progress=progress)
    first, rest = checked[: len(train)], checked[len(train) :]
    return _choose(CheckedRows(first, answers), CheckedRows(rest, answers), policy, finder)


def _choose(
    train: CheckedRows, valid: CheckedRows, policy: DataPolicy, finder: Found | None
) -> Chosen:
    _require_few_malformed(train, valid, policy.max_skipped)
    _require_known(train, policy)
    _require_rated(train, policy)
    code_N = np.concatenate([np.zeros(0, np.uint8), *(filtered(f, policy) for f in train.facts)])
    pairs_P2, near = np.zeros((0, 2), np.int64), dict[int, int]()
    if policy.dedup != "none":
        row_K = np.flatnonzero(code_N == KEPT)
        pairs_P2 = row_K[duplicates(train.digests("whole")[row_K])]
        code_N[pairs_P2[:, 0]] = CODES["duplicate"]
    if finder:
        row_K = np.flatnonzero(code_N == KEPT)
        found_P2, near = _near_pairs(train, valid, row_K, finder, policy.near_threshold)
        code_N[found_P2[:, 0]] = CODES["near duplicate"]
        pairs_P2 = np.concatenate([pairs_P2, found_P2])
    if policy.valid_share:
        held_N = held_out(train.digests("said"), policy.valid_share)
        code_N[(code_N == KEPT) & held_N] = HELD_OUT
    _require_some(code_N, policy)
    held = train.masked(code_N == HELD_OUT) if policy.valid_share else []
    return Chosen(
        train.masked(code_N == KEPT),
        valid.masked(np.ones(len(valid), np.bool_)) or [file for file in held if file.used],
        report_of(train, valid, code_N, pairs_P2, near),
    )


# --- near duplicates ------------------------------------------------------------------------------


def _near_finder() -> Found:
    try:
        return provider("dedup", "near")
    except BackendError as error:
        raise ConfigError(
            "C009",
            "--dedup near needs a plugin",
            where="--dedup near",
            found=f"{error.what}; {error.found}" if error.found else error.what,
            remedy=f"{error.remedy}; or choose --dedup exact",
        ) from error


def _near_pairs(
    train: CheckedRows,
    valid: CheckedRows,
    row_K: NDArray[np.int64],
    finder: Found,
    threshold: float,
) -> tuple[Pairs, dict[int, int]]:
    """Search training rows and, in the same pass, validation rows.

    Args:
        row_K: the training rows that are left.

    Returns:
        (row, earlier row that stays) of training rows; and validation row -> training row that says
        nearly the same.
    """
    whole_K2 = np.concatenate([train.digests("whole")[row_K], valid.digests("whole")])
    made_by = f"{CACHE_VERSION} {finder.id} {finder.version} {threshold}\n"
    key = hashlib.sha256(made_by.encode() + whole_K2.tobytes()).hexdigest()

    def make(folder: Path) -> None:
        used_N, used_V = np.zeros(len(train), np.bool_), np.ones(len(valid), np.bool_)
        used_N[row_K] = True
        found = call_hook(
            finder,
            "vox_near_duplicates",
            texts=chain(train.texts(used_N), valid.texts(used_V)),
            count=len(whole_K2),
            threshold=threshold,
        )
        pairs_P2 = _checked(found, len(whole_K2), finder)
        np.savez(folder / _NEAR_FILE, allow_pickle=False, pairs_P2=pairs_P2)

    def read(folder: Path, _owner: object) -> Pairs | None:
        try:
            return read_arrays(folder / _NEAR_FILE)["pairs_P2"]
        except TORN:
            return None

    pairs_P2 = cached("near", key, make, read).value
    trained_P2 = pairs_P2 < len(row_K)  # validation rows come after them
    leaks = pairs_P2[~trained_P2[:, 0] & trained_P2[:, 1]].tolist()
    return (
        row_K[pairs_P2[trained_P2[:, 0]]],
        {row - len(row_K): int(row_K[other]) for row, other in leaks},
    )


def _checked(pairs: object, count: int, finder: Found) -> Pairs:
    """Pairs of row and earlier row, as `vox_near_duplicates` gave them; wrong ones would be
    cached."""
    pairs_P2 = np.asarray(pairs)
    if not pairs_P2.size:
        return np.zeros((0, 2), np.int64)
    if pairs_P2.ndim == 2 and pairs_P2.shape[1] == 2 and pairs_P2.dtype.kind in "iu":
        row_P, earlier_P = pairs_P2[:, 0], pairs_P2[:, 1]
        if ((earlier_P >= 0) & (earlier_P < row_P) & (row_P < count)).all():
            return pairs_P2.astype(np.int64)
    expected = f"int64 (P, 2): row below {count}, and an earlier row"
    error = wrong_result(finder, "vox_near_duplicates", expected, pairs_P2)
    raise error.but(remedy=f"{error.remedy}; --dedup exact needs none")


# --- refusals -------------------------------------------------------------------------------------


def _require_few_malformed(train: CheckedRows, valid: CheckedRows, most: float) -> None:
    faults = [fault for file in (*train.files, *valid.files) for fault in file.faults]
    malformed = sum(facts.malformed for side in (train, valid) for facts in side.facts)
    rows = malformed + len(train) + len(valid)
    if (share := malformed / rows) <= most:
        return
    raise DataError(
        "D020",
        "more rows are malformed than may be skipped",
        where=", ".join(dict.fromkeys(str(RowPlace(fault.path)) for fault in faults)),
        found=f"{malformed:,} of {rows:,} rows ({share:.2%})",
        expected=f"at most {most:.2%} (--max-skipped)",
        faults=listed(faults),
        remedy=f"correct these lines, or allow so many: --max-skipped {ceil(share * 100) / 100}",
    )


def _require_known(train: CheckedRows, policy: DataPolicy) -> None:
    """Refuse a filter that names a value that no row has."""
    for flag, name in FILTERS.items():
        wanted = getattr(policy, flag)
        there = value_counts(train.facts, name) if wanted else Counter[str]()
        if unknown := [value for value in wanted if value not in there]:
            raise no_such_value(flag, f"--{flag}", f"--{flag}", unknown, there)


def no_such_value(
    name: str, setting: str, where: str, unknown: Sequence[str], there: Counter[str]
) -> DataError:
    """The error for a filter that names what no row has.

    Args:
        name: of the attribute: lane, category, tag.
        setting: the filter itself.
        there: values that rows have, and how many have each.
    """
    known = {value.casefold(): value for value, _ in reversed(there.most_common(_NEAREST))}
    near = filter(None, (nearest(value.casefold(), known) for value in unknown))
    meant = dict.fromkeys(known[name] for name in near)
    shown = [f"{value[:_LONGEST]} ({rows:,})" for value, rows in there.most_common(_SHOWN)]
    more = f" and {len(there) - _SHOWN:,} more" if len(there) > _SHOWN else ""
    return DataError(
        "D021",
        f"no row has the {name} that is asked for",
        where=where,
        found=", ".join(unknown) if setting == where else f"{setting}: {', '.join(unknown)}",
        expected=", ".join(shown) + more or f"rows with a {name}; none has one",
        remedy=(f"did you mean {' or '.join(meant)}? " if meant else "")
        + f"name a {name} that rows have, or leave out {setting}",
    )


def _require_rated(train: CheckedRows, policy: DataPolicy) -> None:
    """Refuse rows without a rating where nothing says what becomes of them."""
    if policy.min_rating is None or policy.unrated is not None:
        return
    unrated = [int(np.isnan(facts.rows_R["rating"]).sum()) for facts in train.facts]
    if not any(unrated):
        return
    files = zip(train.files, unrated, strict=True)
    raise DataError(
        "D022",
        "rows have no rating, and nothing says what becomes of them",
        where=", ".join(str(RowPlace(file.path)) for file, rows in files if rows),
        found=f"{sum(unrated):,} of {len(train):,} rows without a rating",
        remedy="rate these rows, or say --unrated keep or --unrated drop",
    )


def _require_some(code_N: Codes, policy: DataPolicy) -> None:
    """Refuse to go on where no row is left, or none is held out."""
    counts = np.bincount(code_N, minlength=len(NAMES)).tolist()
    if not counts[KEPT]:
        what, remedy = "no row is left to train on", "loosen the filters, or name other data"
    elif policy.valid_share and not counts[HELD_OUT]:
        what, remedy = "no row is held out", "name a file with --valid, or raise --valid-share"
    else:
        return
    raise DataError(
        "D023",
        what,
        where="the rows, after the data filters",
        found=", ".join(f"{n:,} {NAMES[code]}" for code, n in enumerate(counts) if n),
        remedy=remedy,
    )


# --- the report -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileRows:
    """Counts of a file's rows: used, held out, left out.

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
        told = f"{RowPlace(Path(self.file))}: {self.used:,} of {self.rows:,} rows are used"
        if self.held_out:
            told += f", {self.held_out:,} are held out"
        out = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"{told}; left out: {out}" if out else told


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row that was left out, or a validation row that is trained on as well.

    Args:
        reason: malformed, duplicate or near duplicate.
        detail: what is wrong with a malformed row.
        of: the row that says the same.
    """

    place: RowPlace
    reason: str
    detail: str | None = None
    of: RowPlace | None = None

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

    files: Sequence[FileRows] = ()
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
        """Yield a line per file with rows left out, and one about duplicates."""
        yield from (str(file) for file in self.files if file.used < file.rows)
        count = sum(file.left_out.get(each, 0) for file in self.files for each in _DUPLICATES)
        yield from _some(self.duplicates, count, "duplicate is left out", "duplicates are left out")

    def warnings(self) -> Iterator[str]:
        """Yield warnings: malformed rows, and validation rows that are trained on."""
        bad = sum((Counter(file.malformed) for file in self.files), Counter[str]())
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in bad.most_common())
        one, several = "malformed row is skipped", "malformed rows are skipped"
        yield from _some(self.malformed, bad.total(), f"{one} ({kinds})", f"{several} ({kinds})")
        one, several = "validation row also occurs", "validation rows also occur"
        also = " in the training data"
        yield from _some(self.leaks, self.leaked, one + also, several + also)


def _some(rows: Sequence[NamedRow], count: int, one: str, several: str) -> Iterator[str]:
    """A line that names the first few."""
    if count:
        more = f"; and {count - SHOWN:,} more" if count > SHOWN else ""
        named = "; ".join(map(str, rows[:SHOWN]))
        yield f"{count:,} {several if count > 1 else one}: {named}{more}"


def report_of(
    train: CheckedRows, valid: CheckedRows, code_N: Codes, pairs_P2: Pairs, near: Mapping[int, int]
) -> Report:
    """Summarise the choice: counts per file, duplicates, leaks into the validation rows.

    Args:
        code_N: of each training row.
        pairs_P2: duplicates, each with the row that stays.
        near: validation row -> training row that says nearly the same.
    """
    used_K = np.flatnonzero(code_N == KEPT)
    exact_P2 = overlap(train.digests("said")[used_K], valid.digests("said"))
    exact = {row: int(used_K[number]) for row, number in exact_P2.tolist()}
    leaks = sorted({**near, **exact}.items())
    pairs = pairs_P2[np.argsort(pairs_P2[:, 0], kind="stable")][:LISTED].tolist()
    code_V = np.full(len(valid), KEPT, np.uint8)
    return Report(
        files=[*_file_rows("train", train, code_N), *_file_rows("valid", valid, code_V)],
        malformed=[*_malformed(train), *_malformed(valid)],
        duplicates=[
            NamedRow(train.place(row), NAMES[code_N[row]], of=train.place(stays))
            for row, stays in pairs
        ],
        leaks=[
            NamedRow(
                valid.place(row), "duplicate" if row in exact else _NEAR, of=train.place(other)
            )
            for row, other in leaks[:LISTED]
        ],
        leaked=len(leaks),
    )


def overlap(said_N2: Digests, said_V2: Digests) -> Pairs:
    """Validation rows that also occur in the training data: int64 (P, 2), validation row and the
    first training row that says the same."""
    if not len(said_V2):  # sorting a million rows takes a second
        return np.zeros((0, 2), np.int64)
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
            yield NamedRow(RowPlace(file.path, line), MALFORMED, detail)
