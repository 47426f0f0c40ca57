"""Data files that have been looked at: every row is well formed, and it is known what is in them.

A file's rows are read once to find their faults, and only counts are kept. What was found of a file
without faults stays in the cache under the SHA-256 of its bytes, so that a file which has not
changed is not read again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vox_core import files
from vox_core.cache import cache_root
from vox_core.data.look import look
from vox_core.data.readers import NO_FIELDS, FieldMap, Source, is_hub, open_source, place_of
from vox_core.data.records import changed, readable, refuse, unreadable
from vox_core.data.rules import rules_digest
from vox_core.errors import OutputError, StorageError
from vox_core.hashes import file_sha256


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A data file without faults.

    Args:
        state: size and times of the file when it was looked at.
        unused: field that means nothing to vox -> rows that have it.
        source: its rows as JSONL, where it is no such file itself.
    """

    path: Path
    sha256: str
    state: tuple[int, int, int]
    rows: int
    unused: Mapping[str, int]
    source: Source | None = None

    @property
    def lines(self) -> Path:
        """The JSONL with its rows."""
        return self.source.lines if self.source else self.path

    @property
    def key(self) -> str:
        """SHA-256 of all that decides its rows."""
        return self.source.key if self.source else self.sha256

    @property
    def on_disk(self) -> Path:
        """The file that `sha256` and `state` are those of; of a data set of the hub, its rows."""
        return self.lines if is_hub(self.path) else self.path

    def require_unchanged(self) -> None:
        """Raises:
        DataError: D001, the file is not the one that was looked at.
        """
        try:
            same = _state(self.on_disk) == self.state
        except OSError:
            same = False
        if not same:
            raise changed(self.path)


def check_files(paths: Sequence[Path], fields: FieldMap = NO_FIELDS) -> list[CheckedFile]:
    """Look at every row of every file.

    Args:
        fields: `[data.fields]`.

    Raises:
        DataError: D001 for missing, D002 for empty, D003 for malformed files, with every fault;
            D010 to D012, a file cannot be read without a library, or a data set not be had.
    """
    with refuse(paths) as (faults, empty):
        checked = []
        for path in paths:
            source, state = _opened(path, fields)
            sha256 = _sha256(source.lines if is_hub(path) else path)
            found = _recall(source.key) or _look(source, faults, empty)
            file = CheckedFile(path, sha256, state, *found, source)
            file.require_unchanged()  # else these would be the rows of other bytes
            checked.append(file)
    for file in checked:
        with suppress(StorageError, OutputError):  # then the rows are read again next time
            _remember(file)
    return checked


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


def _look(source: Source, faults: list[str], empty: list[Path]) -> tuple[int, Mapping[str, int]]:
    def refuse_row(number: int, text: str) -> None:
        faults.append(f"{place_of(source.path, number)}: {text}")

    with readable(source.path):
        seen = look(source.lines, refuse_row)
    if not seen.rows and not seen.faulty:
        empty.append(source.path)
    return seen.rows, seen.unused


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
    path = _kept(file.key)
    if path.exists() and _recall(file.key):
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
