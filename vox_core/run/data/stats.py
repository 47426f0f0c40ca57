"""`vox data stats`: what there is in the data files, and, with a model, how many tokens that is.

Without a model the files are read once, as they are: of any format, with the fields where
`[data.fields]` says, before any policy. With one the rows are those of `vox train`
under the same settings, tokenised as there and kept in the same cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vox_core import models
from vox_core.config import TrainSettings
from vox_core.data.checked import CheckedFile
from vox_core.data.readers import FieldMap, Source, is_hub, open_source
from vox_core.data.records import find_split, readable
from vox_core.data.stats.duplicates import Duplicates, duplicates
from vox_core.data.stats.languages import language_mix
from vox_core.data.stats.lengths import (
    Lengths,
    Truncation,
    histogram,
    histogram_of,
    lengths,
    truncations,
)
from vox_core.data.stats.rows import Counts, count
from vox_core.errors import ConfigError
from vox_core.run.dataset import Opener
from vox_core.run.inputs import chosen_rows

MOST_VALUES = 20


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Args:
    rows: that are used: after policies, and before any is dropped.
    lengths: of whole rows, before they are cut.
    trained: tokens that are trained, of what is left at `seq_len`.
    """

    model: str
    seq_len: int
    rows: int
    lengths: Lengths
    tokens: int
    trained: int
    truncation: tuple[Truncation, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """Of some files.

    Args:
        forms: name of a form, as `vox data check` says it -> rows.
        malformed: rows that are left out, because they cannot be read.
        characters: lengths of what a row says, in characters.
        roles: messages of each role.
        turns: answers in a conversation -> conversations.
        languages: name -> rows of the sample.
        languages_by: `languages`, or `scripts` of Unicode.
        attributes: name -> the most frequent values -> rows.
    """

    files: dict[str, int]
    rows: int
    malformed: int
    forms: dict[str, int]
    characters: Lengths
    roles: dict[str, int]
    turns: dict[int, int]
    duplicates: Duplicates
    languages: dict[str, int]
    languages_by: str
    sample: int
    attributes: dict[str, dict[str, int]]
    tokens: TokenStats | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StatsReport:
    """Of the files to train on, and of those to validate on."""

    train: Stats
    valid: Stats | None


def stats(
    settings: TrainSettings, *, tokenise: bool, progress: models.Progress | None = None
) -> StatsReport:
    """Count.

    Args:
        tokenise: with the model of the settings.
        progress: told of the bytes that are read.

    Raises:
        InputError: a file cannot be read; with a model, what `vox train` would refuse.
    """
    if not settings.data:
        raise ConfigError(
            "C004",
            "there is no data to count",
            where="--data",
            expected="a data file, or a folder with train.jsonl",
            remedy="vox data stats --data train.jsonl",
        )
    told: dict[str, TokenStats | None] = {"train": None, "valid": None}
    if tokenise:
        told = _tokens(settings, progress)
    train, valid = find_split(settings.data, settings.valid)
    return StatsReport(
        _stats(train, settings.fields, told["train"], progress),
        _stats(valid, settings.fields, told["valid"], progress) if valid else None,
    )


def _stats(
    paths: Sequence[Path],
    fields: FieldMap,
    tokens: TokenStats | None,
    progress: models.Progress | None,
) -> Stats:
    def tell(done: int, size: int) -> None:
        if progress:
            progress("rows", done, size)

    sources = [_opened(path, fields) for path in paths]
    counts = count(paths, tell, [source.lines for source in sources])
    by, languages = language_mix(counts.sample)
    bounds = [*counts.first, counts.rows]
    return Stats(
        files={str(path): bounds[n + 1] - bounds[n] for n, path in enumerate(paths)},
        rows=counts.rows,
        malformed=counts.malformed,
        forms=dict(counts.forms.most_common()),
        characters=lengths(*histogram_of(counts.characters)),
        roles=_roles(counts),
        turns=_turns(counts),
        duplicates=duplicates(counts, paths),
        languages=dict(languages.most_common()),
        languages_by=by,
        sample=len(counts.sample),
        attributes={
            name: {str(value): rows for value, rows in found.most_common(MOST_VALUES)}
            for name, found in counts.attributes.items()
        },
        tokens=tokens,
    )


def _opened(path: Path, fields: FieldMap) -> Source:
    if not is_hub(path):
        with readable(path):  # which says whose fault it is
            path.open("rb").close()
    return open_source(path, fields)


def _roles(counts: Counts) -> dict[str, int]:
    found: Counter[str] = Counter()
    for roles, rows in counts.roles.items():
        for role in roles:
            found[role] += rows
    return dict(found.most_common())


def _turns(counts: Counts) -> dict[int, int]:
    found: Counter[int] = Counter()
    for roles, rows in counts.roles.items():
        if roles:
            found[roles.count("assistant")] += rows
    return dict(sorted(found.items()))


def _tokens(
    settings: TrainSettings, progress: models.Progress | None
) -> dict[str, TokenStats | None]:
    rows = chosen_rows(settings)
    train, valid = rows.train, rows.valid
    opener = Opener.of(settings, progress)

    def of(checked: Sequence[CheckedFile]) -> TokenStats | None:
        if not checked:
            return None
        size = sum(file.state[0] for file in checked)

        def tell(done: int, rows: int) -> None:
            if progress:
                progress("tokens", size * done // max(1, rows), size)

        dataset = opener.open(checked, tell)
        found = histogram(dataset.observed.lengths)
        return TokenStats(
            opener.model.id,
            opener.seq_len,
            dataset.rows,
            lengths(*found),
            dataset.tokens,
            dataset.trained_tokens,
            tuple(truncations(*found, opener.seq_len)),
        )

    return {"train": of(train), "valid": of(valid)}
