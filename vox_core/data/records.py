"""Data files as records, and which files hold training and which validation data.

Every file named is read; whatever is wrong in any of them is reported in one `DataError` before
anything else happens. A record remembers where it came from, so that later faults (a chat template
that refuses it) can name file and line too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vox_core.data.faults import RowError, RowFault
from vox_core.data.jsonl import file_faults, no_text, raw_lines
from vox_core.data.readers import NO_FIELDS, FieldMap, is_remote, open_source, place_of
from vox_core.data.rows import Record, read_row
from vox_core.data.split import require_files
from vox_core.errors import DataError

STEP = "correct these lines, or remove them, and run again"
"""What can be done about any malformed row."""
_TELL_EVERY = 1 << 14

Progress = Callable[[int, int], None]
"""Called with bytes read and all bytes."""


def load_records(paths: Sequence[Path], fields: FieldMap = NO_FIELDS) -> list[Record]:
    """Every row of every file, in order.

    Args:
        fields: `[data.fields]`.

    Raises:
        DataError: D001 for missing, D002 for empty, D003 for malformed files, with every fault;
            D010 to D012, a file cannot be read without a library, or a data set not be had.
    """
    records: list[Record] = []
    with refuse(paths) as (faults, empty):
        for path in paths:
            before = len(records) + len(faults)
            source = open_source(path, fields)
            records += read_records(path, faults, source.lines)
            if len(records) + len(faults) == before:
                empty.append(path)
    return records


@contextmanager
def refuse(paths: Sequence[Path]) -> Iterator[tuple[list[Placed], list[Path]]]:
    """Two lists, for faults and for empty files; what is in them at the end is refused.

    Raises:
        DataError: D001 for missing, D002 for empty, D003 for malformed files, with every fault.
    """
    require_files([path for path in paths if not is_remote(path)])
    faults: list[Placed] = []
    empty: list[Path] = []
    yield faults, empty
    if empty:
        raise _empty(empty)
    if faults:
        raise _malformed(paths, faults)


def read_records(path: Path, faults: list[Placed], lines: Path | None = None) -> Iterator[Record]:
    """Each row of one file that is well formed; the faults of the others go to `faults`.

    Args:
        lines: its rows as JSONL, if it is no such file itself.

    Raises:
        DataError: D001, it cannot be read.
    """
    for line, found in read_lines(path, lines):
        if isinstance(found, RowError):
            faults += placed(path, line, found.faults)
        else:
            yield found


def read_lines(
    path: Path, lines: Path | None = None, progress: Progress | None = None
) -> Iterator[tuple[int, Record | RowError]]:
    """Each row of one file with its number: what it says, or what is wrong with it. A file in
    another format than its name says has one fault, in line 0.

    Raises:
        DataError: D001, it cannot be read.
    """
    lines = lines or path
    with readable(path):
        if faults := file_faults(lines):
            yield 0, RowError(*faults)
            return
        size = lines.stat().st_size
        for count, (number, start, line) in enumerate(raw_lines(lines)):
            if progress and not count % _TELL_EVERY:
                progress(start, size)
            try:
                yield number, read_row(line, path, number)
            except RowError as fault:
                yield number, fault
        if progress:
            progress(size, size)


@dataclass(frozen=True, slots=True)
class Placed:
    """A fault with its file and line; line 0 stands for the whole file."""

    path: Path
    line: int
    fault: RowFault

    def __str__(self) -> str:
        return f"{place_of(self.path, self.line)}: {self.fault}"


def placed(path: Path, line: int, faults: Iterable[RowFault]) -> Iterator[Placed]:
    return (Placed(path, line, fault) for fault in faults)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What the system says of a data file, as D001."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def _empty(paths: Sequence[Path]) -> DataError:
    return DataError(
        "D002",
        "a data file is empty",
        where=", ".join(map(str, paths)),
        found="no row",
        expected="rows",
        remedy="write rows to it, or leave it out of --data and --valid",
    )


def _malformed(paths: Sequence[Path], faults: Sequence[Placed]) -> DataError:
    return DataError(
        "D003",
        "rows of a data file are malformed",
        where=", ".join(map(str, paths)),
        found=f"{len(faults)} fault{'s' if len(faults) > 1 else ''}",
        expected='rows of {"messages": […]}, {"prompt": …, "completion": …} or {"text": …}',
        faults=[*map(str, faults)],
        remedy=next_step({each.fault.code for each in faults}, paths),
    )


def next_step(codes: Collection[str], paths: Iterable[Path]) -> str:
    """The remedy for malformed rows of some files, by the codes of their faults."""
    step = STEP
    if "invalid UTF-8" in codes:
        step += "".join(dict.fromkeys(map(_what_else_it_may_be, paths)))
    if "unknown form" in codes:
        step += (
            "; if only the names differ, say so: --field prompt=NAME --field completion=OTHER, or "
            "[data.fields] in vox.toml"
        )
    return step


def _what_else_it_may_be(path: Path) -> str:
    """Than UTF-8. Where other characters than ASCII's are UTF-8, one that is not is a mistake of
    its own, and changing all of them would be one more."""
    try:
        with path.open("rb") as file:
            start = file.read(1 << 20)
    except OSError:
        return ""
    if meaning := no_text(start):
        return f"; {path.name}: {meaning}"
    if start.isascii() or not start.decode("utf-8", "ignore").isascii():
        return ""
    return (
        f"; {path.name} may be Latin-1 or Windows-1252, and then this makes it UTF-8: "
        "iconv -f windows-1252 -t utf-8 OLD > NEW"
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
