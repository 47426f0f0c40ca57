"""Data files as records, and which files hold training and which validation data.

Every file named is read; whatever is wrong in any of them is reported in one `DataError` before
anything else happens. A record remembers where it came from, so that later faults (a chat template
that refuses it) can name file and line too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vox_core.data.jsonl import RowError, numbered_lines, other_format, parse_object
from vox_core.data.rows import Kind, Message, Row, parse_row
from vox_core.errors import DataError

__all__ = ["Message", "Record", "find_split", "load_records"]

TRAIN_NAME = "train.jsonl"
VALID_NAME = "valid.jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a data file.

    Args:
        kind: chat, completion (then `messages` are a user's and an assistant's) or text.
        source: the file.
        line: from 1.
        messages: the conversation; None for text.
        text: the text; None for chat and completion.
        unused: names of the row's fields that mean nothing to vox.
    """

    kind: Kind
    source: Path
    line: int
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    unused: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.source}, line {self.line}"


def find_split(paths: Sequence[Path], valid: Path | None = None) -> tuple[list[Path], list[Path]]:
    """The files to train on and those to validate on.

    A file is trained on. A folder stands for its `train.jsonl`, and for its `valid.jsonl` where
    there is one. `valid` takes the place of every folder's own validation file.

    Raises:
        DataError: D001, a folder has no `train.jsonl`, or a file is not there.
    """
    train = [path / TRAIN_NAME if path.is_dir() else path for path in paths]
    found = (path / VALID_NAME for path in paths)
    validation = [valid] if valid else [path for path in found if path.is_file()]
    _require_files([*train, *validation])
    return train, validation


def load_records(paths: Sequence[Path]) -> list[Record]:
    """Every row of every file, in order.

    Raises:
        DataError: D001 for missing, D002 for empty, D003 for malformed files, with every fault.
    """
    _require_files(paths)
    records: list[Record] = []
    faults: list[str] = []
    empty: list[Path] = []
    for path in paths:
        found, wrong = _read(path)
        records += found
        faults += wrong
        if not (found or wrong):
            empty.append(path)
    if empty:
        raise _empty(empty)
    if faults:
        raise _malformed(paths, faults)
    return records


def _read(path: Path) -> tuple[list[Record], list[str]]:
    records: list[Record] = []
    faults: list[str] = []
    if other := other_format(path):
        return [], [f"{path}: {other}"]
    try:
        for number, line in numbered_lines(path):
            try:
                records.append(_record(parse_row(parse_object(line)), path, number))
            except RowError as fault:
                faults += (f"{path}, line {number}: {text}" for text in fault.faults)
    except OSError as error:
        raise _unreadable(path, error) from error
    return records, faults


def _record(row: Row, path: Path, line: int) -> Record:
    if row.kind == "text":
        return Record("text", path, line, text=row.text, unused=row.unused)
    return Record(row.kind, path, line, messages=row.messages, unused=row.unused)


def _require_files(paths: Sequence[Path]) -> None:
    if missing := [path for path in paths if not path.is_file()]:
        raise DataError(
            "D001",
            "a data file is missing",
            where=", ".join(map(str, missing)),
            found="a folder" if missing[0].is_dir() else "nothing there",
            expected=f"a JSONL file, or a folder with {TRAIN_NAME} and, if wanted, {VALID_NAME}",
            remedy="correct the path given with --data or --valid",
        )


def _empty(paths: Sequence[Path]) -> DataError:
    return DataError(
        "D002",
        "a data file is empty",
        where=", ".join(map(str, paths)),
        found="no row",
        expected="one JSON object a line",
        remedy="write rows to it, or leave it out of --data and --valid",
    )


def _malformed(paths: Sequence[Path], faults: Sequence[str]) -> DataError:
    return DataError(
        "D003",
        "rows of a data file are malformed",
        where=", ".join(map(str, paths)),
        found=f"{len(faults)} fault{'s' if len(faults) > 1 else ''}",
        expected='rows of {"messages": […]}, {"prompt": …, "completion": …} or {"text": …}',
        faults=faults,
        remedy="correct these lines, or remove them, and run again",
    )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        "D001",
        "a data file cannot be read",
        where=path,
        found=error.strerror,
        expected="a file that you may read",
        remedy="check its permissions, or name another file with --data",
    )
