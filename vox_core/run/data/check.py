"""`vox data check`: what is wrong with data files, and what is in them.

Every row of every file is looked at, whatever is wrong with the ones before. Nothing is loaded but
the rows; with a model its tokenizer is, and the chat template is tried on each row that is well
formed, as `vox train` would. Only counts and the first faults are kept, so that a file may be
larger than memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core import models
from vox_core.config import TrainSettings
from vox_core.data.kinds import Faults
from vox_core.data.look import look
from vox_core.data.readers import FieldMap, Source, open_source, place_of
from vox_core.data.records import read_records, readable
from vox_core.data.split import find_split
from vox_core.errors import ConfigError

if TYPE_CHECKING:
    from vox_core.data.render import Renderer

_WORTH_TELLING = 10_000_000
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
        first: the first faults, whole.
        template: the model whose chat template was tried, if any.
    """

    files: list[FileReport]
    rows: int
    faults: int
    kinds: dict[str, int]
    first: list[str]
    template: str | None = None
    notes: list[str] = field(default_factory=list)


def check(
    settings: TrainSettings,
    *,
    paths: Sequence[Path] = (),
    with_model: bool = False,
    progress: Progress | None = None,
) -> CheckReport:
    """Look at the data of `settings`.

    Args:
        paths: in place of those of `settings`.
        with_model: try the chat template of `settings.model`, too.
        progress: called with what is done, bytes read and all bytes.

    Raises:
        ConfigError: C004, no data is named.
        DataError: a file is missing, or cannot be read at all. What is wrong with rows is no error
            here but the result.
    """
    train, valid = find_split(_named(settings, paths), settings.valid)
    sides = [*((path, "train") for path in train), *((path, "valid") for path in valid)]
    faults, reports = Faults(), list[FileReport]()
    renderer = _renderer(settings, progress) if with_model else None
    for path, side in sides:
        reports.append(_checked(path, side, settings.fields, faults, renderer, progress))
    # The mask audit of `vox_core.data.audit` joins here: what it finds of the same files, under the
    # same settings, with a model only.
    return CheckReport(
        reports,
        sum(each.rows for each in reports),
        faults.total,
        dict(faults.by_number()),
        faults.first,
        settings.model if with_model else None,
        [f"{path} has no rows" for path in _empty(reports)],
    )


def _named(settings: TrainSettings, paths: Sequence[Path]) -> Sequence[Path]:
    if paths or settings.data:
        return paths or settings.data
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
    faults: Faults,
    renderer: Renderer | None,
    progress: Progress | None,
) -> FileReport:
    source = open_source(path, fields)

    def refuse(number: int, text: str) -> None:
        faults.add(place_of(path, number), text)

    def tell(done: int, size: int) -> None:
        if progress and size >= _WORTH_TELLING:
            progress(f"checking {path.name}", done, size)

    with readable(path):
        seen = look(source.lines, refuse, tell)
    refused = sum(1 for _ in _refused(source, renderer, faults)) if renderer else 0
    return FileReport(
        str(path),
        side,
        seen.rows - refused,
        dict(seen.forms),
        dict(seen.unused),
        seen.faulty + refused,
    )


def _renderer(settings: TrainSettings, progress: Progress | None) -> Renderer:
    from vox_core.data.render import Renderer
    from vox_core.data.tokenizer import load_tokenizer

    model = models.resolve(settings.model, revision=settings.revision, progress=progress)
    return Renderer(load_tokenizer(model.path))


def _refused(source: Source, renderer: Renderer, faults: Faults) -> Iterator[int]:
    """The rows that the chat template refuses."""
    from vox_core.data.render import RenderError

    for record in read_records(source.path, [], source.lines):
        try:
            renderer.render(record)
        except RenderError as fault:
            faults.add(record.place, str(fault))
            yield record.line


def _empty(reports: Sequence[FileReport]) -> list[str]:
    counts = Counter({each.path: each.rows + each.faulty for each in reports})
    return [path for path, rows in counts.items() if not rows]
