"""Rows of data files with their faults, and the errors of files that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vox_core.data.faults import RowError, RowFault
from vox_core.data.formats import is_known, place_of
from vox_core.data.json_rows import file_faults, raw_lines
from vox_core.data.rows import Answers, Record, read_row
from vox_core.errors import DataError, StorageError

STEP = (
    "correct these lines, or leave them out with --malformed-rows skip (up to 1 %; --max-skipped "
    "allows more)"
)
"""What can be done about any malformed row."""
NO_ROW = "correct these files or leave them out: they have no row that could be kept"
WHOLE_FILE = "correct the file, or convert it, and run again"
_FORMS = (
    'rows of {"messages": […]}, {"prompt": …, "completion": …} or {"text": …}; for an objective, '
    'also {"prompt": …, "chosen": …, "rejected": …}, {"chosen": […], "rejected": […]} or '
    '{"prompt": …, "completion": …, "label": true}'
)
FORMS_OF_PROMPTS = (
    'rows of {"prompt": …} or {"messages": […]}, with the fields that the rewards read, as "answer"'
)
"""Where the model answers."""
_NAMED = 5
"""Rows that a recurring fault names."""
_TELL_EVERY = 1 << 14

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes read and all bytes."""


def read_lines(
    path: Path,
    lines: Path | None = None,
    progress: Progress | None = None,
    answers: Answers = "some",
) -> Iterator[tuple[int, Record | RowError]]:
    """Yield each row of one file with its number: the record, or its faults. A file in
    another format than its name says has one fault, in line 0.

    Args:
        lines: its rows as JSONL, if it is no such file itself.
        answers: as for `parse_row`.

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
                progress(f"reading {path.name}", start, size)
            try:
                yield number, read_row(line, path, number, answers=answers)
            except RowError as fault:
                yield number, fault
        if progress:
            progress(f"reading {path.name}", size, size)


class RowPlace(NamedTuple):
    """A line of a file; line 0 stands for the whole file."""

    path: Path
    line: int = 0

    def __str__(self) -> str:
        return place_of(*self)

    def to_json(self) -> dict[str, Any]:
        return {"file": str(self.path), "line": self.line}


class Placed(NamedTuple):
    """A fault with its file and line; line 0 stands for the whole file."""

    path: Path
    line: int
    fault: RowFault


def listed(faults: Sequence[tuple[Path, int, object]]) -> list[str]:
    """Format faults; one that recurs in a file is one line with its first rows."""
    rows: dict[tuple[Path, object], dict[int, None]] = {}
    for path, line, fault in faults:
        rows.setdefault((path, fault), {})[line] = None
    lines = []
    for (path, fault), found in rows.items():
        numbers = [*found]
        some = [place_of(path, numbers[0]), *map(str, numbers[1:_NAMED])]
        more = f" and {len(numbers) - _NAMED:,} more" if len(numbers) > _NAMED else ""
        lines.append(f"{', '.join(some)}{more}: {fault}")
    return lines


# --- errors ---------------------------------------------------------------------------------------


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise I/O errors of a data file as D001."""
    try:
        yield
    except (OSError, StorageError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        missing = isinstance(cause, FileNotFoundError)
        raise DataError(
            "D001",
            "a data file cannot be read",
            where=place_of(path),
            found=cause.strerror,
            remedy="correct the path" if missing else "check its permissions, or name another file",
        ) from error


def empty(paths: Sequence[Path]) -> DataError:
    where, remedy = ", ".join(map(place_of, paths)), "write rows to it, or leave it out"
    return DataError("D002", "a data file is empty", where=where, found="no row", remedy=remedy)


def malformed(paths: Sequence[Path], faults: Sequence[Placed], lost: bool = False) -> DataError:
    return DataError(
        "D003",
        "rows of a data file are malformed",
        where=", ".join(map(place_of, paths)),
        found=f"{len(faults)} fault{'s' if len(faults) > 1 else ''}",
        expected=_FORMS,
        faults=listed(faults),
        remedy=next_step({each.fault.code for each in faults}, paths, lost),
    )


def next_step(codes: Collection[str], paths: Collection[Path], lost: bool) -> str:
    """The remedy for malformed rows, by the codes of their faults; `lost`: no row could be kept."""
    step = WHOLE_FILE if {*codes} <= {"other format", "damaged file"} else NO_ROW if lost else STEP
    if "invalid UTF-8" in codes:
        for path in dict.fromkeys(filter(_may_be_latin_1, paths)):
            step += (
                f"; {path.name} may be Latin-1 or Windows-1252, and then this makes it UTF-8: "
                "iconv -f windows-1252 -t utf-8 OLD > NEW"
            )
    if "invalid JSON" in codes and any(path.suffix in (".yaml", ".yml") for path in paths):
        step = "settings are flags, or go into vox.toml; of the data, name the files themselves"
    elif "invalid JSON" in codes and not all(map(is_known, paths)):
        step += (
            "; plain text is read from .txt files, each of which is one document: rename the file"
        )
    if "unknown form" in codes:
        step += (
            "; if only the names differ, say so: --field prompt=NAME --field completion=OTHER, or "
            "[data.fields] in vox.toml; prompts alone: --objective grpo --reward FILE.py:FUNCTION"
        )
    return step


def _may_be_latin_1(path: Path) -> bool:
    """Whether a file has bytes beyond ASCII, and none of them are UTF-8. Where some are, one that
    is not is a mistake of its own, and changing all of them would be one more."""
    try:
        with path.open("rb") as file:
            start = file.read(1 << 20)
    except OSError:
        return False
    return not start.isascii() and start.decode("utf-8", "ignore").isascii()
