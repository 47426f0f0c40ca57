"""Which rows are shown: spread over the data, or those that are named.

Rows are those of files that have been looked at (`checked.py`), of any format, as far as the policy
of the data uses them. Lines are passed over without being understood, but for those that are shown.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from vox_core.data.checked import CheckedFile
from vox_core.data.faults import RowError
from vox_core.data.jsonl import numbered_lines
from vox_core.data.records import Record, changed, readable, record_of
from vox_core.data.rows import read_row
from vox_core.errors import DataError

_PLACE = re.compile(r"(?:(.+):)?(\d+)")


def spread(rows: int, wanted: int, seed: int) -> list[int]:
    """`wanted` of the numbers below `rows`, in order: one of each of so many equal stretches."""
    wanted = min(wanted, rows)
    chosen = random.Random(seed)
    bounds = [rows * n // wanted for n in range(wanted + 1)] if wanted else []
    return [chosen.randrange(a, b) for a, b in pairwise(bounds)]


def numbered(files: Sequence[CheckedFile], wanted: Sequence[int]) -> Iterator[Record]:
    """The rows of these numbers, from 0 over what is used of all files; `wanted` is in order.

    Raises:
        DataError: D001, a file has changed, or cannot be read.
    """
    left = sorted(wanted, reverse=True)
    rows = ((file, number, line) for file in files for number, line in _rows(file))
    for at, (file, number, line) in enumerate(rows):
        if not left:
            return
        if left[-1] == at:
            left.pop()
            yield _parsed(file.path, number, line)


def named(files: Sequence[CheckedFile], places: Sequence[str]) -> Iterator[Record]:
    """The rows at `FILE:LINE`, or `LINE` where there is one file.

    Raises:
        DataError: D001, a file has changed, or cannot be read; D051, there is no such row among the
            data, or the policy leaves it out.
    """
    paths = list(dict.fromkeys(file.path for file in files))  # one may stand on both sides
    wanted = [_place(paths, text) for text in places]
    for path in dict.fromkeys(path for path, _ in wanted):
        lines = {line for each, line in wanted if each == path}
        sides = [file for file in files if file.path == path]
        for number, line in _lines(sides[0]):
            if number in lines and any(_uses(side, number) for side in sides):
                lines.remove(number)
                yield _parsed(path, number, line)
            if not lines:
                break
        if lines:
            raise _missing_in(sides[0], min(lines))


def _rows(file: CheckedFile) -> Iterator[tuple[int, bytes | None]]:
    """Each row that is used, with its number."""
    return ((number, line) for number, line in _lines(file) if _uses(file, number))


def _lines(file: CheckedFile) -> Iterator[tuple[int, bytes | None]]:
    with readable(file.path):
        yield from numbered_lines(file.lines)


def _uses(file: CheckedFile, number: int) -> bool:
    return file.chosen is None or number in file.chosen


def _parsed(path: Path, number: int, line: bytes | None) -> Record:
    try:
        return record_of(read_row(line), path, number)
    except RowError as fault:  # every row that is used has been looked at
        raise changed(path) from fault


def _missing_in(file: CheckedFile, number: int) -> DataError:
    where = f"{file.path}:{number}"
    if any(each == number for each, _ in _lines(file)):
        return _missing(where, "a row that is used", "left out by the policy of the data")
    return _missing(where, f"a row in line {number}")


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


def _missing(where: str, expected: str, found: str | None = None) -> DataError:
    return DataError(
        "D051",
        "the row to be shown is not there",
        where=f"--row {where}",
        found=found,
        expected=expected,
        remedy="name a row of the data given with --data or --valid: --row FILE:LINE",
    )
