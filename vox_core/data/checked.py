"""Data files that have been looked at: every row is well formed, and it is known what is in them.

A file's rows are read once to find their faults, and only counts are kept; with `facts`, also what
policies ask of each row (`policy/facts.py`), in the same pass. What was found of a file without
faults stays in the cache under the SHA-256 of its bytes, so that a file which has not changed is
not read again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vox_core import files
from vox_core.cache import cache_root
from vox_core.data.jsonl import RowError
from vox_core.data.policy.mask import Mask
from vox_core.data.records import (
    Record,
    changed,
    read_lines,
    readable,
    refuse,
    told,
    unreadable,
)
from vox_core.data.rules import rules_digest
from vox_core.errors import OutputError, StorageError
from vox_core.hashes import file_sha256

if TYPE_CHECKING:
    from vox_core.data.policy.facts import Facts

Progress = Callable[[Path, int], None]
"""Told of a file and of the rows of it that have been read."""
_TOLD_EVERY = 10_000


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A data file that has been looked at.

    Args:
        state: size and times of the file when it was looked at.
        rows: those that are well formed; all are, unless some may be skipped.
        unused: field that means nothing to vox -> rows that have it.
        chosen: which rows are used; None for all.
        facts: what policies ask of the rows, where somebody wanted to know.
    """

    path: Path
    sha256: str
    state: tuple[int, int, int]
    rows: int
    unused: Mapping[str, int]
    chosen: Mask | None = None
    facts: Facts | None = field(default=None, compare=False, repr=False)

    @property
    def used(self) -> int:
        """Rows that are used."""
        return self.rows if self.chosen is None else self.chosen.rows

    @property
    def identity(self) -> str:
        """What decides which rows these are: the bytes of the file, and those that are used."""
        return self.sha256 if self.chosen is None else f"{self.sha256}:{self.chosen.digest}"

    def require_unchanged(self) -> None:
        """Raises:
        DataError: D001, the file is not the one that was looked at.
        """
        try:
            same = _state(self.path) == self.state
        except OSError:
            same = False
        if not same:
            raise changed(self.path)


def check_files(
    paths: Sequence[Path],
    *,
    facts: bool = False,
    skip: bool = False,
    progress: Progress | None = None,
) -> list[CheckedFile]:
    """Look at every row of every file.

    Args:
        facts: take those of the rows, too.
        skip: with `facts`; malformed rows are no fault, and stand among the facts. A file without
            any other row is one all the same.
        progress: told now and then while rows are read; not where all is known already.

    Raises:
        DataError: D001 for missing, D002 for empty, D003 for malformed files, with every fault.
    """
    looking = _Looking(facts, skip, progress)
    with refuse(paths) as (faults, empty):
        checked = []
        for path in paths:
            with readable(path):
                state = _state(path)
            sha256 = _sha256(path)
            rows, unused, found = looking.at(path, sha256, faults, empty)
            file = CheckedFile(path, sha256, state, rows, unused, facts=found)
            file.require_unchanged()  # else these would be the rows of other bytes
            checked.append(file)
    for file in checked:
        with suppress(StorageError, OutputError):  # then the rows are read again next time
            _remember(file)
    return checked


class _Looking:
    """Looks at one file after another, in the cache first."""

    def __init__(self, facts: bool, skip: bool, progress: Progress | None) -> None:
        self._facts, self._skip, self._progress = facts, skip, progress

    def at(
        self, path: Path, sha256: str, faults: list[str], empty: list[Path]
    ) -> tuple[int, Mapping[str, int], Facts | None]:
        if not self._facts:
            return (*(_recall(sha256) or _look(path, faults, empty, self._progress)), None)
        from vox_core.data.policy import facts

        if (found := facts.recall(sha256)) is None:
            collector = facts.Collector()
            _look(path, [], [], self._progress, collector)
            found = collector.facts()
            facts.remember(sha256, found)
        if not found.rows and not found.faults:
            empty.append(path)
        if not self._skip or not found.rows:
            faults += (text for line, fault in found.faults for text in told(path, line, [fault]))
        return found.rows, found.unused, found


class _Listener(Protocol):
    """Somebody who wants to know of each row."""

    def add(self, record: Record) -> None: ...

    def refuse(self, line: int, fault: RowError) -> None: ...


def unused_fields(checked: Sequence[CheckedFile]) -> Counter[str]:
    """Fields that mean nothing to vox, with the rows that have them."""
    counts: Counter[str] = Counter()
    for file in checked:
        counts.update(file.unused)
    return counts


def _look(
    path: Path,
    faults: list[str],
    empty: list[Path],
    progress: Progress | None,
    listener: _Listener | None = None,
) -> tuple[int, Mapping[str, int]]:
    rows, unused, wrong = 0, Counter[str](), False
    for line, found in read_lines(path):
        if isinstance(found, RowError):
            wrong = True
            faults += told(path, line, found.faults)
            if listener:
                listener.refuse(line, found)
            continue
        rows += 1
        unused.update(found.unused)
        if listener:
            listener.add(found)
        if progress and not rows % _TOLD_EVERY:
            progress(path, rows)
    if not rows and not wrong:
        empty.append(path)
    return rows, unused


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except StorageError as error:
        if isinstance(error.__cause__, OSError):
            raise unreadable(path, error.__cause__) from error
        raise


def _state(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _kept(sha256: str) -> Path:
    return cache_root() / "rows" / f"{sha256}.json"


def _remember(file: CheckedFile) -> None:
    path = _kept(file.sha256)
    if (file.facts and file.facts.faults) or (path.exists() and _recall(file.sha256)):
        return
    files.make_folder(path.parent)
    found = {"rules": rules_digest(), "rows": file.rows, "unused": dict(file.unused)}
    files.write_json(path, found)


def _recall(sha256: str) -> tuple[int, Mapping[str, int]] | None:
    """What was found of a file with these bytes, under the rules of today."""
    try:
        entry = json.loads(_kept(sha256).read_bytes())
    except (OSError, ValueError):
        return None
    match entry:
        case {"rules": rules, "rows": int(rows), "unused": dict(unused)} if (
            rules == rules_digest() and all(isinstance(n, int) for n in unused.values())
        ):
            return rows, unused
    return None
