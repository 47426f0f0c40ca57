"""Checked data files: each row is well formed or a reported fault, and its facts are there.

Each file is read once; the cache keeps the facts of its rows (`row_facts.py`) under the SHA-256 of
its bytes, so a file that has not changed is not read again.

`cut` makes blocks of checked rows, each tokenised by itself. A fault found then means that the file
has changed.

Shape legend: N rows of several files, R of one; 2 halves of a digest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core.cache import file_sha256
from vox_core.data.faults import RowError, changed
from vox_core.data.fields import NO_FIELDS, FieldMap
from vox_core.data.formats import is_remote, require_files
from vox_core.data.json_rows import parse_object, raw_lines
from vox_core.data.records import FORMS_OF_PROMPTS, Placed, RowPlace, empty, malformed, readable
from vox_core.data.row_facts import RowFacts, facts_of, row_text
from vox_core.data.rows import Answers, Examples, Row, read_row, rows_of
from vox_core.data.source import RowSource, open_source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.data.records import Progress


BLOCK_BYTES = 1 << 21
_FEWEST = 2
"""Rows of a block: an objective may compare a row with another one of its block."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a file.

    Args:
        file: the file's number among those of the data set.
        lines: number and bytes of each row; None for a line that is too long.
    """

    path: Path
    file: int
    lines: Sequence[tuple[int, bytes | None]]

    def rows(self, examples: Examples | None = None) -> Iterator[Row]:
        """The rows (D001 if the file has changed).

        Args:
            examples: makes the sides of each; None for supervised training.
        """
        try:
            yield from rows_of(self.lines, self.path, examples)
        except RowError as fault:
            raise changed(self.path) from fault


def cut(files: Sequence[CheckedFile], size: int = BLOCK_BYTES) -> Iterator[Block]:
    """Every row in use of every file, in order; blocks of about `size` bytes, of two rows at least,
    unless a file has one.

    Raises:
        DataError: D001, a file cannot be read.
    """
    for index, file in enumerate(files):
        block, held = list[tuple[int, bytes | None]](), 0
        for number, line in file.used_lines():
            block.append((number, line))
            held += len(line or b"")
            if held >= size and len(block) >= 2 * _FEWEST:
                yield Block(file.path, index, block[:-_FEWEST])
                block = block[-_FEWEST:]
                held = sum(len(line or b"") for _, line in block)
        if block:
            yield Block(file.path, index, block)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file when it was read; `state` is its size and its times of change."""

    path: Path
    sha256: str
    state: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        state = _state(path)  # first, so that a change of what is being hashed is noticed
        return cls(path, file_sha256(path), state)

    def unchanged(self) -> bool:
        """Whether it looks as it did, or has the same bytes, as after a `touch`."""
        try:
            return _state(self.path) == self.state or file_sha256(self.path) == self.sha256
        except OSError:
            return False


def _state(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A data file whose rows were checked.

    Args:
        origin: the file itself; of a remote data set, its rows.
        source: its rows as JSONL.
        rows: those that are well formed; all are, unless some may be skipped.
        unused: field that means nothing to vox -> rows that have it.
        chosen: byte n is 1 if line n is used, else 0; None if all rows are.
        facts: of the rows, until rows are chosen.
    """

    path: Path
    origin: SourceFile
    source: RowSource
    rows: int = 0
    unused: Mapping[str, int] = field(default_factory=dict)
    chosen: bytes | None = field(default=None, repr=False)
    facts: RowFacts | None = field(default=None, compare=False, repr=False)

    @property
    def used(self) -> int:
        return self.rows if self.chosen is None else self.chosen.count(1)

    @property
    def lines(self) -> Path:
        """The JSONL with its rows."""
        return self.source.lines

    @property
    def identity(self) -> str:
        """Digest of the rows in use: that of the file, and of the choice among its rows."""
        if self.chosen is None:
            return self.source.key
        used = self.chosen.rstrip(b"\0")  # the lines after the last used one count for nothing
        return f"{self.source.key}:{hashlib.sha256(used).hexdigest()}"

    @property
    def faults(self) -> list[Placed]:
        """Faults of malformed rows, until rows are chosen; one that all rows have is the file's."""
        found = _facts(self).faults
        if not self.rows and len(found) > len({fault for _, fault in found}) == 1:
            found = [(0, found[0][1].of_every_row)]
        return [Placed(self.path, line, fault) for line, fault in found]

    def uses(self, line: int) -> bool:
        """Whether the row in this line is used."""
        chosen = self.chosen
        return chosen is None or (line < len(chosen) and bool(chosen[line]))

    def used_lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Number and bytes of each row in use (D001 if the file cannot be read); None for a line
        that is too long."""
        with readable(self.path):
            for number, _, line in raw_lines(self.lines):
                if self.uses(number):
                    yield number, line

    def parsed(self) -> Iterator[tuple[int, Mapping[str, object]]]:
        """Number and fields of each row in use (D001 if the file cannot be read)."""
        return ((number, parse_object(line)) for number, line in self.used_lines())

    def require_unchanged(self) -> None:
        """Refuse a file that is not the one that was checked (D001)."""
        if not self.origin.unchanged():
            raise changed(self.path)


def check_files(
    paths: Sequence[Path],
    fields: FieldMap = NO_FIELDS,
    *,
    skip: bool = False,
    answers: Answers = "some",
    progress: Progress | None = None,
) -> list[CheckedFile]:
    """Check every row of every file.

    Args:
        fields: `[data.fields]`.
        skip: malformed rows stay among the facts and are no error. A file without any other row
            is one all the same.
        answers: as for `parse_row`.

    Raises:
        DataError: D001 for missing, D002 for empty, D003 for malformed files, with every fault;
            D010, a plugin or library is missing; D011 and D012, of a remote data set.
    """
    require_files([path for path in paths if not is_remote(path)])
    checked = [_checked(path, fields, answers, progress) for path in paths]
    faults = [fault for file in checked if not (skip and file.rows) for fault in file.faults]
    if none := [file.path for file in checked if not file.rows and not file.faults]:
        raise empty(none)
    if faults:
        lost = skip or not any(file.rows for file in checked)
        error = malformed([*dict.fromkeys(each.path for each in faults)], faults, lost)
        raise error if answers == "some" else error.but(expected=FORMS_OF_PROMPTS)
    return checked


def _checked(
    path: Path, fields: FieldMap, answers: Answers, progress: Progress | None
) -> CheckedFile:
    if is_remote(path):
        source = open_source(path, fields)
        origin = SourceFile.of(source.lines)
    else:
        with readable(path):
            origin = SourceFile.of(path)  # before it is read
            source = open_source(path, fields)
    file = CheckedFile(path, origin, source)
    facts = facts_of(file, answers, progress)
    file.require_unchanged()  # else these would be the rows of other bytes
    return replace(file, rows=facts.rows, unused=facts.unused, facts=facts)


def unused_fields(checked: Sequence[CheckedFile]) -> Counter[str]:
    """Fields that mean nothing to vox, with the rows that have them; a file counts once."""
    files = {each.path: each for each in checked}.values()
    return sum((Counter(each.unused) for each in files), Counter[str]())


class CheckedRows:
    """The rows of files checked with `answers` and their facts, numbered over all files."""

    def __init__(self, files: Sequence[CheckedFile], answers: Answers) -> None:
        self.files, self.facts, self._answers = files, [_facts(file) for file in files], answers
        self._ends = np.cumsum([0, *(each.rows for each in self.facts)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def digests(self, column: str) -> NDArray[np.uint64]:
        """The content digests `said` or `whole` of all rows."""
        empty_02 = np.zeros((0, 2), np.uint64)
        return np.concatenate([empty_02, *(each.rows_R[column] for each in self.facts)])

    def place(self, row: int) -> RowPlace:
        """File and line of a row."""
        file = int(self._ends.searchsorted(row, side="right")) - 1
        line = self.facts[file].rows_R["line"][row - int(self._ends[file])]
        return RowPlace(self.files[file].path, int(line))

    def parts(self, value_N: NDArray[Any]) -> list[NDArray[Any]]:
        """Values of all rows, cut into those of each file."""
        return [value_N[a:b] for a, b in pairwise(self._ends.tolist())]

    def masked(self, used_N: NDArray[np.bool_]) -> list[CheckedFile]:
        """The files with some of their rows; without a mask if that is all there is in one."""
        masked = []
        for file, facts, used_R in zip(self.files, self.facts, self.parts(used_N), strict=True):
            line_R = facts.rows_R["line"]
            used_L = np.zeros(int(line_R.max(initial=0)) + 1, np.bool_)
            used_L[line_R] = used_R
            everything = bool(used_R.all()) and not facts.faults
            masked.append(
                replace(file, chosen=None if everything else used_L.tobytes(), facts=None)
            )
        return masked

    def texts(self, used_N: NDArray[np.bool_]) -> Iterator[str]:
        """Yield what some of the rows say, read from their files; D001 if one has changed."""
        for file in self.masked(used_N):
            try:
                for number, line in file.used_lines():
                    yield row_text(read_row(line, file.path, number, answers=self._answers))
            except RowError as fault:
                raise changed(file.path) from fault
            file.require_unchanged()


def _facts(file: CheckedFile) -> RowFacts:
    assert file.facts is not None
    return file.facts
