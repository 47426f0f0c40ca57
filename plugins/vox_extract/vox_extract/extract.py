"""Write the rows of Python sources or Markdown files as one JSONL file.

The same sources give the same bytes: files are read in the order of their names, and what chooses
among rows or wordings is a hash. The file is whole or not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from vox_core.api import files
from vox_core.errors import DataError, OutputError
from vox_extract import locate, markdown
from vox_extract.locate import Library, Progress, Reader
from vox_extract.python_rows import python_rows
from vox_extract.rows import Extracted, Sieve, spread

Form: TypeAlias = Literal["python", "markdown"]


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """Counts of an extraction.

    Args:
        files: that were read.
        kinds: kind of question -> rows.
        left_out: reason -> rows, or definitions, that were not taken.
        licences: licence -> rows.
        unread: files that were passed over, each with the reason.
    """

    out: Path
    rows: int
    files: int
    kinds: dict[str, int]
    left_out: dict[str, int]
    licences: dict[str, int]
    unread: tuple[str, ...]


def extract(
    form: Form,
    sources: Sequence[str],
    out: Path,
    *,
    private: bool = False,
    limit: int | None = None,
    max_characters: int,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExtractReport:
    """Write the rows of all sources.

    Args:
        private: private names too.
        limit: rows at most, taken from all over.
        max_characters: of an answer.

    Raises:
        DataError: D060, a source is not there; D061, no row came of all of them.
        OutputError: O001, there is such a file already, and `overwrite` is not set; O004, it is one
            of the sources.
        StorageError: it cannot be written.
    """
    if not overwrite:
        _require_absent(out)
    libraries = [_LOCATE[form](name) for name in sources]
    paths = [file.path for library in libraries for file in library.files]
    files.require_apart(out, [("the source", path) for path in paths])
    sieve, reader = Sieve(max_characters), Reader(sum(map(_size, paths)), progress)
    rows: list[Extracted] = []
    for library in libraries:
        if form == "python":
            rows += python_rows(library, sieve, reader, private=private)
        else:
            rows += markdown.markdown_rows(library, sieve, reader)
    if not rows:
        raise _nothing(sources, reader, sieve.left_out)
    if limit is not None and len(rows) > limit:
        sieve.left_out["over the limit"] += len(rows) - limit
        rows = spread(rows, limit)
    files.make_folder(out.parent)
    with files.atomic_file(out) as file:
        for row in rows:
            file.write(row.line())
    return ExtractReport(
        out,
        len(rows),
        reader.files,
        dict(Counter(row.kind for row in rows).most_common()),
        dict((+sieve.left_out).most_common()),
        dict(Counter(str(row.provenance["licence"]) for row in rows).most_common()),
        tuple(reader.unread),
    )


_LOCATE: dict[Form, Callable[[str], Library]] = {
    "python": locate.locate,
    "markdown": markdown.locate,
}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it is named when it is read
        return 0


def _require_absent(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise OutputError(
            "O001",
            "the output file exists",
            where=out,
            remedy="choose another one with --out, or give --overwrite",
        )


def _nothing(sources: Sequence[str], reader: Reader, left_out: Counter[str]) -> DataError:
    reasons = ", ".join(f"{number} {reason}" for reason, number in (+left_out).most_common())
    return DataError(
        "D061",
        "nothing was extracted",
        where=", ".join(sources),
        found=f"{reader.files} files read" + (f"; left out: {reasons}" if reasons else ""),
        expected="docstrings, or headings with text",
        faults=reader.unread,
        remedy="--private takes private names too; or name other sources",
    )
