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
from vox_core.data.records import changed, read_records, readable, refuse, unreadable
from vox_core.data.rules import rules_digest
from vox_core.errors import OutputError, StorageError
from vox_core.hashes import file_sha256


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A data file without faults.

    Args:
        state: size and times of the file when it was looked at.
        unused: field that means nothing to vox -> rows that have it.
    """

    path: Path
    sha256: str
    state: tuple[int, int, int]
    rows: int
    unused: Mapping[str, int]

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


def check_files(paths: Sequence[Path]) -> list[CheckedFile]:
    """Look at every row of every file.

    Raises:
        DataError: D001 for missing, D002 for empty, D003 for malformed files, with every fault.
    """
    with refuse(paths) as (faults, empty):
        checked = []
        for path in paths:
            with readable(path):
                state = _state(path)
            sha256 = _sha256(path)
            found = _recall(sha256) or _look(path, faults, empty)
            file = CheckedFile(path, sha256, state, *found)
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


def _look(path: Path, faults: list[str], empty: list[Path]) -> tuple[int, Mapping[str, int]]:
    rows, unused, wrong = 0, Counter[str](), len(faults)
    for record in read_records(path, faults):
        rows += 1
        unused.update(record.unused)
    if not rows and len(faults) == wrong:
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
    if path.exists() and _recall(file.sha256):
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
