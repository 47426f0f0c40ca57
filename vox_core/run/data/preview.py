"""`vox data preview`: some rows as they will be trained, and what the audit says.

Rows are those of `vox train` under the same settings, of files of any format, and named by the
place where they stand there. All rows are audited where their tokens are
kept already or are quickly made; otherwise only those that are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vox_core import files, models
from vox_core.config import TrainSettings
from vox_core.data.audit.report import Audit, Finding, require_sound
from vox_core.data.dataset import build_dataset
from vox_core.data.preview.choose import named, numbered, spread
from vox_core.data.preview.look import Looker, SeenRow
from vox_core.data.preview.page import is_page, page
from vox_core.errors import InputError, OutputError, VoxError
from vox_core.run.dataset import Opener
from vox_core.run.inputs import chosen_rows

QUICK_BYTES = 24_000_000
"""Of data files that are tokenised for the audit without being asked: some seconds."""


@dataclass(frozen=True, slots=True)
class PreviewReport:
    """Rows to be looked at.

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
    shown: tuple[SeenRow, ...]
    audited: int
    audit: Audit | None
    error: VoxError | None = None
    html: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.audit.findings if self.audit else ()

    def facts(self) -> dict[str, str]:
        """What there is to say of them, by label."""
        tokens, trained = sum(len(r.ids) for r in self.shown), sum(r.trained for r in self.shown)
        told = {
            "model": self.model,
            "rows": f"{len(self.shown):,} of {self.rows:,}, at most {self.seq_len:,} tokens each",
            "shown": f"{tokens:,} tokens, {trained:,} trained",
        }
        if self.notes:
            told["template"] = "; ".join(self.notes)
        if self.audit:
            told["audited"] = f"{self.audited:,} rows, {self.audit}"
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
            "html": str(self.html) if self.html else None,
        }


def preview(
    settings: TrainSettings,
    *,
    number: int = 5,
    seed: int = 0,
    places: Sequence[str] = (),
    whole: bool = False,
    html: Path | None = None,
    progress: models.Progress | None = None,
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
    chosen = list(named(both, places) if places else numbered(both, spread(total, number, seed)))
    opener = Opener.of(settings, progress)
    model, seq_len, tokenizer = opener.model, opener.seq_len, opener.load()
    shown = tuple(map(Looker(tokenizer, seq_len).look, chosen))
    report = PreviewReport(model.id, seq_len, total, shown, 0, None, notes=model.notes)
    try:
        if whole or sum(file.lines.stat().st_size for file in train) <= QUICK_BYTES:
            dataset, sources = opener.open(train), [file.path for file in train]
        else:
            dataset = build_dataset(chosen, tokenizer, seq_len)
            sources = list(dict.fromkeys(record.source for record in chosen))
        found = opener.audit(dataset, sources)
        report = replace(report, audited=dataset.rows, audit=found)
        require_sound({"training": found})
    except InputError as error:  # the rows are shown all the same: they may be the reason
        report = replace(report, error=error)
    if html:
        title = f"vox data preview: {model.id}"
        files.write_text(html, page(title, report.facts(), report.findings, report.shown))
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
