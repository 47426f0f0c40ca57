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
from vox_core.cache import CACHE_VERSION, cache_root
from vox_core.data.faults import RowError, RowFault
from vox_core.data.look import look
from vox_core.data.policy.mask import Mask
from vox_core.data.readers import NO_FIELDS, FieldMap, Source, is_hub, open_source
from vox_core.data.records import (
    Placed,
    Record,
    changed,
    read_lines,
    readable,
    refuse,
    unreadable,
)
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
        source: its rows as JSONL, where it is no such file itself.
        chosen: which rows are used; None for all.
        facts: what policies ask of the rows, where somebody wanted to know.
    """

    path: Path
    sha256: str
    state: tuple[int, int, int]
    rows: int
    unused: Mapping[str, int]
    source: Source | None = None
    chosen: Mask | None = None
    facts: Facts | None = field(default=None, compare=False, repr=False)

    @property
    def used(self) -> int:
        """Rows that are used."""
        return self.rows if self.chosen is None else self.chosen.rows

    @property
    def lines(self) -> Path:
        """The JSONL with its rows."""
        return self.source.lines if self.source else self.path

    @property
    def key(self) -> str:
        """SHA-256 of all that decides what its rows are."""
        return self.source.key if self.source else self.sha256

    @property
    def identity(self) -> str:
        """What decides which rows these are: those of the file, and which of them are used."""
        return self.key if self.chosen is None else f"{self.key}:{self.chosen.digest}"

    @property
    def on_disk(self) -> Path:
        """The file that `sha256` and `state` are those of; of a data set of the hub, its rows."""
        return self.lines if is_hub(self.path) else self.path

    def require_unchanged(self) -> None:
        """Raises:
        DataError: D001, the file is not the one that was looked at.
        """
        _require_unchanged(self.path, self.on_disk, self.state)


def check_files(
    paths: Sequence[Path],
    fields: FieldMap = NO_FIELDS,
    *,
    facts: bool = False,
    skip: bool = False,
    progress: Progress | None = None,
) -> list[CheckedFile]:
    """Look at every row of every file.

    Args:
        fields: `[data.fields]`.
        facts: take those of the rows, too.
        skip: with `facts`; malformed rows are no fault, and stand among the facts. A file without
            any other row is one all the same.
        progress: told now and then while rows are read; not where all is known already.

    Raises:
        DataError: D001 for missing, D002 for empty, D003 for malformed files, with every fault;
            D010 to D012, a file cannot be read without a library, or a data set not be had.
    """
    looking = _Looking(facts, skip, progress)
    with refuse(paths) as (faults, empty):
        checked = []
        for path in paths:
            source, state = _opened(path, fields)
            sha256 = _sha256(source.lines if is_hub(path) else path)
            rows, unused, found = looking.at(source, state, faults, empty)
            file = CheckedFile(path, sha256, state, rows, unused, source, facts=found)
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
        self,
        source: Source,
        state: tuple[int, int, int],
        faults: list[Placed],
        empty: list[Path],
    ) -> tuple[int, Mapping[str, int], Facts | None]:
        if not self._facts:
            return (*(_recall(source.key) or _look(source, faults, empty)), None)
        from vox_core.data.policy import facts

        if (found := facts.recall(source.key)) is None:
            collector = facts.Collector()
            _listen(source, collector, self._progress)
            found = collector.facts()
            on_disk = source.lines if is_hub(source.path) else source.path
            _require_unchanged(source.path, on_disk, state)  # else these are of other bytes
            facts.remember(source.key, found)
        if not found.rows and not found.faults:
            empty.append(source.path)
        if not self._skip or not found.rows:
            faults += (Placed(source.path, line, fault) for line, fault in found.faults)
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


def _opened(path: Path, fields: FieldMap) -> tuple[Source, tuple[int, int, int]]:
    """A file as JSONL, and its state before it was read."""
    if is_hub(path):
        source = open_source(path, fields)
        return source, _state(source.lines)
    with readable(path):
        state = _state(path)
    _sha256(path)  # which says what is wrong where it cannot be read
    return open_source(path, fields), state


def _look(source: Source, faults: list[Placed], empty: list[Path]) -> tuple[int, Mapping[str, int]]:
    def refuse_row(line: int, fault: RowFault) -> None:
        faults.append(Placed(source.path, line, fault))

    with readable(source.path):
        seen = look(source.lines, refuse_row)
    if not seen.rows and not seen.faulty:
        empty.append(source.path)
    return seen.rows, seen.unused


def _listen(source: Source, listener: _Listener, progress: Progress | None) -> None:
    """Read every row, for somebody who wants to know what each says."""
    rows = 0
    for line, found in read_lines(source.path, source.lines):
        if isinstance(found, RowError):
            listener.refuse(line, found)
            continue
        rows += 1
        listener.add(found)
        if progress and not rows % _TOLD_EVERY:
            progress(source.path, rows)


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


def _require_unchanged(path: Path, on_disk: Path, state: tuple[int, int, int]) -> None:
    try:
        same = _state(on_disk) == state
    except OSError:
        same = False
    if not same:
        raise changed(path)


def _kept(sha256: str) -> Path:
    return cache_root() / "rows" / f"{sha256}.json"


def _remember(file: CheckedFile) -> None:
    path = _kept(file.key)
    if (file.facts and file.facts.faults) or (path.exists() and _recall(file.key)):
        return
    files.make_folder(path.parent)
    found = {"version": CACHE_VERSION, "rows": file.rows, "unused": dict(file.unused)}
    files.write_json(path, found)


def _recall(sha256: str) -> tuple[int, Mapping[str, int]] | None:
    """What was found of a file with these bytes, under this cache version."""
    try:
        entry = json.loads(_kept(sha256).read_bytes())
    except (OSError, ValueError):
        return None
    match entry:
        case {"version": version, "rows": int(rows), "unused": dict(unused)} if (
            version == CACHE_VERSION and all(isinstance(n, int) for n in unused.values())
        ):
            return rows, unused
    return None
