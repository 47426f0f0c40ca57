"""`vox data preview`: some rows as they will be trained, and what the audit says.

Rows are those of `vox train` under the same settings, of files of any format, and named by the
place where they stand there. All rows are audited where their tokens are
kept already or are quickly made; otherwise only those that are shown.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from vox_core.api.commands import counted
from vox_core.api.files import write_text
from vox_core.api.models import Observe, Progress, ignore
from vox_core.api.rows import (
    Audit,
    CheckedFile,
    Encoder,
    Examples,
    Finding,
    Opener,
    Record,
    Row,
    RowError,
    changed,
    chosen_rows,
    encode_rows,
    examples_of,
    raw_lines,
    read_row,
    readable,
    require_sound,
    require_trained,
    row_of,
)
from vox_core.api.settings import TrainSettings
from vox_core.errors import DataError, InputError, OutputError, VoxError
from vox_data.page import is_page, page
from vox_data.token_view import TokenView, TokenViewer

_PLACE = re.compile(r"(?:(.+):)?(\d+)")
QUICK_BYTES = 24_000_000
"""Of data files that are tokenised for the audit without being asked: some seconds."""


@dataclass(frozen=True, slots=True)
class PreviewReport:
    """Rows of a preview.

    Args:
        rows: of all files.
        audited: rows that the findings are about.
        error: why the data would not be trained.
        html: the page that was written.
        notes: what a person should know of the chat template.
    """

    model: str
    seq_len: int
    rows: int
    shown: tuple[TokenView, ...]
    audited: int
    audit: Audit | None
    error: VoxError | None = None
    html: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.audit.findings if self.audit else ()

    def facts(self) -> dict[str, str]:
        """Return a summary of the shown rows, by label."""
        tokens, trained = sum(len(r.ids) for r in self.shown), sum(r.trained for r in self.shown)
        rows = len({(each.file, each.line) for each in self.shown})  # an objective shows several
        told = {
            "model": self.model,
            "rows": f"{rows:,} of {self.rows:,}, at most {self.seq_len:,} tokens each",
            "shown": f"{tokens:,} tokens, {trained:,} trained",
        }
        if self.notes:
            told["template"] = "; ".join(self.notes)
        if self.audit:
            told["audited"] = f"{counted(self.audited, 'row')}, {self.audit}"
        return told | ({"error": str(self.error)} if self.error else {})

    def to_json(self) -> dict[str, Any]:
        """All but the error."""
        return {
            "model": self.model,
            "seq_len": self.seq_len,
            "rows": self.rows,
            "shown": [row.to_json() for row in self.shown],
            "audited": self.audited,
            "audit": self.audit.to_json() if self.audit else None,
            "html": self.html,
        }


def preview(
    settings: TrainSettings,
    *,
    number: int = 5,
    seed: int = 0,
    places: Sequence[str] = (),
    whole: bool = False,
    html: Path | None = None,
    progress: Progress | None = None,
    observe: Observe = ignore,
) -> PreviewReport:
    """Look at some rows.

    Args:
        number: rows to show, spread over the data; `seed` chooses among them.
        places: `FILE:LINE` of the rows to show instead.
        whole: audit all rows, however long it takes.
        html: write a page there.

    Raises:
        InputError: the data or the model cannot be used; D051, a row is not there; O001, something
            else is where the page should go.
    """
    if html:
        _require_writable(html)
    rows = chosen_rows(settings)
    train, valid = rows.train, rows.valid
    both = [*train, *valid]
    total = sum(file.used for file in both)
    examples = examples_of(settings.objective_spec)
    spaced = spread(total, number, seed)
    found = named(both, places, examples) if places else numbered(both, {*spaced}, examples)
    chosen = list(found)
    opener = Opener.of(settings, progress, observe)
    model, seq_len, tokenizer = opener.model, opener.seq_len, opener.tokenizer
    shown = tuple(map(TokenViewer(tokenizer, seq_len).view, chosen))
    report = PreviewReport(model.id, seq_len, total, shown, 0, None, notes=model.notes)
    try:
        if whole or sum(file.lines.stat().st_size for file in train) <= QUICK_BYTES:
            dataset = opener.open(train)
        else:
            encoder = Encoder(tokenizer, seq_len)
            dataset = encode_rows(encoder, map(Row.of, chosen), {})
            require_trained(dataset.stats, lambda: encoder)
        audits = opener.audits(dataset)
        report = replace(report, audited=dataset.stats.rows, audit=audits["training"])
        require_sound(audits)
    except InputError as error:  # the rows are shown all the same: they may be the reason
        report = replace(report, error=error)
    if html:
        title = f"vox data preview: {model.id}"
        write_text(html, page(title, report.facts(), report.findings, report.shown))
        report = replace(report, html=html)
    return report


def _require_writable(path: Path) -> None:
    """Refuse to write over anything but a page that was made here.

    Raises:
        OutputError: O001.
    """
    if path.exists() and not (path.is_file() and is_page(path)):
        raise OutputError(
            "O001",
            "the file exists, and is no page of vox's",
            where=path,
            remedy="choose another name with --html",
        )


# --- which rows are shown -------------------------------------------------------------------------


def spread(rows: int, wanted: int, seed: int) -> list[int]:
    """`wanted` of the numbers below `rows`, in order: one of each of so many equal stretches."""
    wanted = min(wanted, rows)
    chosen = random.Random(seed)
    bounds = [rows * n // wanted for n in range(wanted + 1)] if wanted else []
    return [chosen.randrange(a, b) for a, b in pairwise(bounds)]


def numbered(
    files: Sequence[CheckedFile], wanted: Collection[int], examples: Examples | None = None
) -> Iterator[Record]:
    """The rows with these numbers, from 0 over the used rows of all files.

    Args:
        examples: makes the documents of a row; None for supervised training.

    Raises:
        DataError: D001, a file has changed, or cannot be read.
    """
    rows = ((file, number, line) for file in files for number, line in file.used_lines())
    some = islice(rows, max(wanted, default=-1) + 1)
    for at, (file, number, line) in enumerate(some):
        if at in wanted:
            yield from _parsed(file.path, number, line, examples)


def named(
    files: Sequence[CheckedFile], places: Sequence[str], examples: Examples | None = None
) -> Iterator[Record]:
    """The rows at `FILE:LINE`, or `LINE` where there is one file.

    Args:
        examples: as for `numbered`.

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
            if number in lines and any(side.uses(number) for side in sides):
                lines.remove(number)
                yield from _parsed(path, number, line, examples)
            if not lines:
                break
        if lines:
            raise _missing_in(sides[0], min(lines))


def _lines(file: CheckedFile) -> Iterator[tuple[int, bytes | None]]:
    with readable(file.path):
        yield from ((number, line) for number, _, line in raw_lines(file.lines))


def _parsed(
    path: Path, number: int, line: bytes | None, examples: Examples | None
) -> Iterable[Record]:
    try:
        # A mismatched document has the answer of its own row here.
        row = row_of(line, path, number, examples, line)
        sides = [replace(each, form=label or each.form) for label, each in row.sides.items()]
        return sides or [read_row(line, path, number)]
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
