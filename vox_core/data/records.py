"""Data files as records, and which files hold training and which validation data.

Every file named is read; whatever is wrong in any of them is reported in one `DataError` before
anything else happens. A record remembers where it came from, so that later faults (a chat template
that refuses it) can name file and line too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_core.data.jsonl import RowError, numbered_lines, other_format, parse_object
from vox_core.data.messages import Message
from vox_core.data.rows import NO_ATTRIBUTES, Attributes, Kind, Row, parse_row
from vox_core.errors import DataError

__all__ = ["Message", "Record", "find_split", "load_records"]

TRAIN_NAME = "train.jsonl"
VALID_NAME = "valid.jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a data file.

    Args:
        kind: chat, completion (then `messages` are a user's and an assistant's), text, or
            preference (then `messages` end with the chosen answer).
        source: the file.
        line: from 1.
        messages: the conversation; None for text.
        text: the text; None for chat and completion.
        unused: names of the row's fields that mean nothing to vox.
        rejected, tools, attributes: as `Row` has them.
    """

    kind: Kind
    source: Path
    line: int
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    unused: tuple[str, ...] = ()
    rejected: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    attributes: Attributes = NO_ATTRIBUTES

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
    records: list[Record] = []
    with refuse(paths) as (faults, empty):
        for path in paths:
            before = len(records) + len(faults)
            records += read_records(path, faults)
            if len(records) + len(faults) == before:
                empty.append(path)
    return records


@contextmanager
def refuse(paths: Sequence[Path]) -> Iterator[tuple[list[str], list[Path]]]:
    """Two lists, for faults and for empty files; what is in them at the end is refused.

    Raises:
        DataError: D001 for missing, D002 for empty, D003 for malformed files, with every fault.
    """
    _require_files(paths)
    faults: list[str] = []
    empty: list[Path] = []
    yield faults, empty
    if empty:
        raise _empty(empty)
    if faults:
        raise _malformed(paths, faults)


def read_records(path: Path, faults: list[str]) -> Iterator[Record]:
    """Each row of one file that is well formed; the faults of the others go to `faults`.

    Raises:
        DataError: D001, it cannot be read.
    """
    for line, found in read_lines(path):
        if isinstance(found, RowError):
            faults += told(path, line, found.faults)
        else:
            yield found


def read_lines(path: Path) -> Iterator[tuple[int, Record | RowError]]:
    """Each row of one file with the number of its line: what it says, or what is wrong with it. A
    file in another format has one fault, in line 0.

    Raises:
        DataError: D001, it cannot be read.
    """
    with readable(path):
        if other := other_format(path):
            yield 0, RowError(other)
            return
        for number, line in numbered_lines(path):
            try:
                yield number, record_of(parse_row(parse_object(line)), path, number)
            except RowError as fault:
                yield number, fault


def told(path: Path, line: int, faults: Iterable[str]) -> Iterator[str]:
    """Faults with their place."""
    place = f"{path}, line {line}" if line else f"{path}"
    return (f"{place}: {text}" for text in faults)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What the system says of a data file, as D001."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def record_of(row: Row, path: Path, line: int) -> Record:
    """A row with the place where it stands."""
    text, messages = (row.text, None) if row.kind == "text" else (None, row.messages)
    return Record(
        row.kind, path, line, messages, text, row.unused, row.rejected, row.tools, row.attributes
    )


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


def unreadable(path: Path, error: OSError) -> DataError:
    """What it means that a data file is there and cannot be opened or read."""
    return DataError(
        "D001",
        "a data file cannot be read",
        where=path,
        found=error.strerror,
        expected="a file that you may read",
        remedy="check its permissions, or name another file with --data",
    )


def changed(path: Path) -> DataError:
    """What it means that a file is no longer the one that was looked at."""
    return DataError(
        "D001",
        "a data file changed while it was read",
        where=path,
        found="other content than a moment before",
        expected="a file that nobody writes to",
        remedy="run again when it is written",
    )
