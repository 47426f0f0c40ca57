"""`vox data check`: what is wrong with data files, and what is in them.

Every row of every file is looked at, whatever is wrong with the ones before. Nothing is loaded but
the rows; with a model its tokenizer is, and the chat template is tried on each row that is well
formed, as `vox train` would. Only counts and the first faults are kept, so that a file may be
larger than memory.

Where nothing is wrong with the rows and there is a model, they are tokenised as for `vox train`
under the same settings, policy and all, and their masks audited. The tokens stay in the same cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.config import TrainSettings
from vox_core.data.faults import Code, FaultCounts, RowError
from vox_core.data.readers import FieldMap, open_source, place_of
from vox_core.data.records import next_step, read_lines
from vox_core.data.rows import Record
from vox_core.data.split import find_split
from vox_core.errors import ConfigError, InputError
from vox_core.run.sources import resolve_model

if TYPE_CHECKING:
    from vox_core.data.audit import Audit
    from vox_core.data.render import Renderer

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class FileReport:
    """What is in one file.

    Args:
        rows: that are well formed.
        forms: name of a form -> rows.
        unused: field that means nothing to vox -> rows that have it.
        faulty: rows that are not well formed, or that the chat template refuses.
    """

    path: str
    side: str
    rows: int
    forms: dict[str, int]
    unused: dict[str, int]
    faulty: int


@dataclass(frozen=True)
class CheckReport:
    """What was found.

    Args:
        faults: how many.
        kinds: the kinds of faults, the most frequent first, with their number.
        first: the first faults, in full.
        codes: those of the faults.
        template: the model whose chat template was tried, if any.
        audits: what was found of the masks, where there are no faults; by training and validation.
        error: what else `vox train` would refuse.
    """

    files: list[FileReport]
    rows: int
    faults: int
    kinds: dict[str, int]
    first: list[str]
    codes: frozenset[Code] = frozenset()
    template: str | None = None
    notes: list[str] = field(default_factory=list)
    audits: Mapping[str, Audit] = field(default_factory=dict)
    error: InputError | None = None

    @property
    def sound(self) -> bool:
        """Nothing is wrong with the rows and their masks."""
        wrong = any(each.of_level("error") for each in self.audits.values())
        return not (self.faults or self.notes or wrong)

    @property
    def trains(self) -> bool:
        """Some row is of a form that is trained."""
        return any(form != "preference" for file in self.files for form in file.forms)

    @property
    def next(self) -> str:
        """What to do about the faults; empty if there are none."""
        paths = [Path(file.path) for file in self.files if file.faulty]
        return next_step(self.codes, paths) if self.faults else ""

    def to_json(self) -> dict[str, Any]:
        """All but the error."""
        return {
            "files": [asdict(file) for file in self.files],
            "rows": self.rows,
            "faults": self.faults,
            "kinds": self.kinds,
            "first": self.first,
            "template": self.template,
            "notes": self.notes,
            "audit": {what: found.to_json() for what, found in self.audits.items()},
        }


def check(
    settings: TrainSettings,
    *,
    with_model: bool = False,
    progress: Progress | None = None,
) -> CheckReport:
    """Look at the data of `settings`.

    Args:
        with_model: try the chat template of `settings.model`, too, and audit the masks.
        progress: called with what is done, bytes read and all bytes.

    Raises:
        ConfigError: C004, no data is named.
        DataError: a file is missing, or cannot be read at all. What is wrong with rows is no error
            here but the result.
    """
    _require_data(settings)
    train, valid = find_split(settings.data, settings.valid)
    sides = [*((path, "train") for path in train), *((path, "valid") for path in valid)]
    faults, reports = FaultCounts(), list[FileReport]()
    renderer = _renderer(settings, progress) if with_model else None
    for path, side in sides:
        reports.append(_checked(path, side, settings.fields, faults, renderer, progress))
    report = CheckReport(
        reports,
        sum(each.rows for each in reports),
        faults.total,
        dict(faults.by_number()),
        faults.first,
        frozenset(faults.codes),
        settings.model if with_model else None,
        [f"{path} has no rows" for path in _empty(reports)],
    )
    if not with_model or not report.sound:
        return report
    try:
        return replace(report, audits=_audits(settings, progress))
    except InputError as error:  # what was found is shown all the same
        return replace(report, error=error)


def _audits(settings: TrainSettings, progress: Progress | None) -> dict[str, Audit]:
    """What is found of the masks of the rows that `vox train` would use."""
    from vox_core.run.dataset import Opener
    from vox_core.run.inputs import chosen_rows

    rows = chosen_rows(settings)
    size = sum(file.lines.stat().st_size for file in rows.train)

    def tell(done: int, all: int) -> None:
        if progress:
            progress("tokens", size * done // max(1, all), size)

    opener = Opener.of(settings, progress)
    train = opener.open(rows.train, tell)
    valid = opener.open(rows.valid) if rows.valid else None
    return opener.audits(train, valid)


def _require_data(settings: TrainSettings) -> None:
    if settings.data:
        return
    raise ConfigError(
        "C004",
        "there is no data to check",
        where="--data",
        expected="a data file, a folder with train.jsonl, or hf:owner/name",
        remedy="vox data check train.jsonl",
    )


def _checked(
    path: Path,
    side: str,
    fields: FieldMap,
    faults: FaultCounts,
    renderer: Renderer | None,
    progress: Progress | None,
) -> FileReport:
    source = open_source(path, fields)
    forms, unused = Counter[str](), Counter[str]()
    faulty = refused = 0

    def tell(done: int, size: int) -> None:
        if progress:
            progress(f"checking {path.name}", done, size)

    for number, found in read_lines(path, source.lines, tell):
        if isinstance(found, RowError):
            faulty += 1
            for fault in found.faults:
                faults.add(place_of(path, number), fault)
            continue
        forms[found.form] += 1
        if found.unused:
            unused.update(found.unused)
        if renderer and (refusal := _refusal(renderer, found)):
            refused += 1
            faults.count("chat template", f"{found.place}: {refusal}")
    return FileReport(
        str(path),
        side,
        forms.total() - refused,
        dict(forms.most_common()),
        dict(unused),
        faulty + refused,
    )


def _renderer(settings: TrainSettings, progress: Progress | None) -> Renderer:
    from vox_core.data.render import Renderer
    from vox_core.data.tokenizer import load_tokenizer

    model = resolve_model(
        settings.model,
        revision=settings.revision,
        template=settings.template,
        progress=progress,
    )
    return Renderer(load_tokenizer(model.tokenizer))


def _refusal(renderer: Renderer, record: Record) -> str:
    """Why the chat template refuses a row; empty if it does not."""
    from vox_core.data.render import RenderError

    try:
        renderer.render(record)
    except RenderError as fault:
        return str(fault)
    return ""


def _empty(reports: Sequence[FileReport]) -> list[str]:
    counts = Counter({each.path: each.rows + each.faulty for each in reports})
    return [path for path, rows in counts.items() if not rows]
