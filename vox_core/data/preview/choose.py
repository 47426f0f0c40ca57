"""Which rows are shown: spread over the data, or those that are named."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from itertools import pairwise
from pathlib import Path

from vox_core.data.checked import CheckedFile
from vox_core.data.jsonl import RowError, numbered_lines, parse_object
from vox_core.data.records import Record, readable, record_of
from vox_core.data.rows import parse_row
from vox_core.errors import DataError

_PLACE = re.compile(r"(?:(.+):)?(\d+)")


def spread(rows: int, wanted: int, seed: int) -> list[int]:
    """`wanted` of the numbers below `rows`, in order: one of each of so many equal stretches."""
    wanted = min(wanted, rows)
    chosen = random.Random(seed)
    bounds = [rows * n // wanted for n in range(wanted + 1)] if wanted else []
    return [chosen.randrange(a, b) for a, b in pairwise(bounds)]


def numbered(files: Sequence[CheckedFile], wanted: Sequence[int]) -> Iterator[Record]:
    """The rows of these numbers, from 0 over all that are used; `wanted` is in order."""
    left = sorted(wanted, reverse=True)
    rows = (row for file in files for row in _rows(file))
    for at, row in enumerate(rows):
        if not left:
            return
        if left[-1] == at:
            left.pop()
            if record := row():
                yield record


def _rows(file: CheckedFile) -> Iterator[Callable[[], Record | None]]:
    """Each row that is used, read when it is asked for; None for one that is malformed."""
    with readable(file.path):
        for number, line in numbered_lines(file.lines):
            if file.chosen is None or file.chosen.part(number, 1):
                yield partial(_parsed, file.path, number, line)


def _parsed(path: Path, number: int, line: bytes | None) -> Record | None:
    try:
        return record_of(parse_row(parse_object(line)), path, number)
    except RowError:
        return None


def named(files: Sequence[CheckedFile], places: Sequence[str]) -> Iterator[Record]:
    """The rows at `FILE:LINE`, or `LINE` where there is one file.

    Raises:
        DataError: D051, there is no such row among the data.
    """
    lines_of = {file.path: file.lines for file in files}
    wanted = [_place([*lines_of], text) for text in places]
    for path in dict.fromkeys(path for path, _ in wanted):
        lines = {line for each, line in wanted if each == path}
        for record in _at(path, lines_of[path], frozenset(lines)):
            lines.remove(record.line)
            yield record
        if lines:
            raise _missing(f"{path}:{min(lines)}", f"a row in line {min(lines)}")


def _at(path: Path, rows: Path, lines: Set[int]) -> Iterator[Record]:
    last = max(lines)
    with readable(path):
        for number, line in numbered_lines(rows):
            if number > last:
                return
            if number in lines and (record := _parsed(path, number, line)):
                yield record


def _place(paths: Sequence[Path], text: str) -> tuple[Path, int]:
    found = _PLACE.fullmatch(text)
    if found is None:
        raise _missing(text, "FILE:LINE, such as train.jsonl:12")
    name, line = found[1], int(found[2])
    if name is None and len(paths) == 1:
        return paths[0], line
    same = [path for path in paths if name and _same(path, name)]
    if len(same) != 1:
        raise _missing(text, f"one of {', '.join(map(str, paths))}, and a line")
    return same[0], line


def _same(path: Path, name: str) -> bool:
    return str(path) == name or path.name == name or path.absolute() == Path(name).absolute()


def _missing(where: str, expected: str) -> DataError:
    return DataError(
        "D051",
        "the row to be shown is not there",
        where=f"--row {where}",
        expected=expected,
        remedy="name a row of the data given with --data or --valid: --row FILE:LINE",
    )
