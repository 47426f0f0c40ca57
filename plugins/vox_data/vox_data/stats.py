"""`vox data stats`: what there is in the data files, and, with a model, how many tokens that is.

Without a model the files are read once, as they are: of any format, with the fields where
`[data.fields]` says, before any policy. With one the rows are those of `vox train`
under the same settings, tokenised as there and kept in the same cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core.api.models import Observe, Progress, ignore
from vox_core.api.rows import (
    CheckedFile,
    FieldMap,
    Opener,
    RowSource,
    chosen_rows,
    find_split,
    is_remote,
    open_source,
    readable,
)
from vox_core.api.settings import TrainSettings
from vox_core.errors import ConfigError
from vox_data.counting import Counts, Duplicates, count

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_VALUES = 20
UNCLEAR = "unclear"
_LEAST_LETTERS = 12
_LEAST_PROBABLE = 0.7
PERCENTILES = (5, 25, 50, 75, 90, 95, 99)
LIMITS = tuple(512 << n for n in range(12))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of some rows.

    Args:
        percentiles: p -> the length that p % of the rows do not exceed.
    """

    total: int
    mean: float
    longest: int
    percentiles: dict[int, int]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the numbers of an attribute, one per row that has it.

    Args:
        percentiles: p -> the number that p % of the rows do not exceed.
    """

    rows: int
    mean: float
    smallest: float
    largest: float
    percentiles: dict[int, float]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Effect of a length limit: documents that exceed it, and their tokens beyond it; or prompts
    that are dropped, as they leave no room for an answer, and all of their tokens."""

    seq_len: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Args:
    rows: after filters, and before any is dropped.
    documents: one for each row; an objective may make several of a row.
    lengths: of whole documents, before they are cut.
    trained: trained tokens, after the cut at `seq_len`.
    prompts: examples that the model answers itself; none of their tokens is trained.
    """

    model: str
    seq_len: int
    rows: int
    documents: int
    lengths: Lengths
    tokens: int
    trained: int
    prompts: int
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
        attributes: name -> the most frequent values -> rows.
        numbers: attribute of which all values are numbers -> their spread.
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
    sample: int
    attributes: dict[str, dict[str, int]]
    numbers: dict[str, Spread]
    tokens: TokenStats | None = None


@dataclass(frozen=True, slots=True)
class StatsReport:
    """Of the files to train on, and of those to validate on."""

    train: Stats
    valid: Stats | None


def stats(
    settings: TrainSettings,
    *,
    tokenise: bool,
    progress: Progress | None = None,
    observe: Observe = ignore,
) -> StatsReport:
    """Count.

    Args:
        tokenise: with the model of the settings.
        progress: told of the bytes that are read.

    Raises:
        InputError: a file cannot be read; with a model, what `vox train` would refuse.
    """
    require_data(settings, "vox data stats")
    told: dict[str, TokenStats | None] = {"train": None, "valid": None}
    if tokenise:
        told = _tokens(settings, progress, observe)
    train, valid = find_split(settings.data, settings.valid)
    return StatsReport(
        _stats(train, settings.fields, told["train"], progress),
        _stats(valid, settings.fields, told["valid"], progress) if valid else None,
    )


def require_data(settings: TrainSettings, command: str) -> None:
    """Refuse settings without data.

    Raises:
        ConfigError: C004.
    """
    if not settings.data:
        raise ConfigError(
            "C004",
            "there is no data to read",
            where="--data",
            expected="a data file, a folder with train.jsonl, or hf:owner/name",
            remedy=f"{command} train.jsonl",
        )


def _stats(
    paths: Sequence[Path], fields: FieldMap, tokens: TokenStats | None, progress: Progress | None
) -> Stats:
    def tell(done: int, size: int) -> None:
        if progress:
            progress("rows", done, size)

    sources = [open_readable(path, fields) for path in paths]
    counts = count(sources, tell)
    languages, (roles, turns) = language_mix(counts.sample), _roles_and_turns(counts)
    bounds = [*counts.first, counts.rows]
    return Stats(
        files={str(path): bounds[n + 1] - bounds[n] for n, path in enumerate(paths)},
        rows=counts.rows,
        malformed=counts.malformed,
        forms=dict(counts.forms.most_common()),
        characters=lengths(*histogram(Counter(counts.characters))),
        roles=roles,
        turns=turns,
        duplicates=counts.duplicates(sources),
        languages=dict(languages.most_common()),
        sample=len(counts.sample),
        attributes={
            name: {str(value): rows for value, rows in found.most_common(MOST_VALUES)}
            for name, found in counts.attributes.items()
        },
        numbers={
            name: spread(values)
            for name, values in counts.numbers.items()
            if len(values) == counts.attributes[name].total()
        },
        tokens=tokens,
    )


def open_readable(path: Path, fields: FieldMap) -> RowSource:
    """A data file as JSONL (D001 if it cannot be read)."""
    if not is_remote(path):
        with readable(path):
            path.open("rb").close()
    return open_source(path, fields)


def _roles_and_turns(counts: Counts) -> tuple[dict[str, int], dict[int, int]]:
    roles, turns = Counter[str](), Counter[int]()
    for names, rows in counts.roles.items():
        for role in names:
            roles[role] += rows
        if names:
            turns[names.count("assistant")] += rows
    return dict(roles.most_common()), dict(sorted(turns.items()))


def _tokens(
    settings: TrainSettings, progress: Progress | None, observe: Observe
) -> dict[str, TokenStats | None]:
    rows = chosen_rows(settings, progress=progress)
    train, valid = rows.train, rows.valid
    opener = Opener.of(settings, progress, observe)

    def of(checked: Sequence[CheckedFile]) -> TokenStats | None:
        if not checked:
            return None
        dataset = opener.open(checked)
        found, prompts = histogram(dataset.stats.lengths), dataset.stats.prompts
        return TokenStats(
            opener.model.id,
            opener.seq_len,
            dataset.stats.rows,
            dataset.stats.lengths.total(),
            lengths(*found),
            dataset.tokens,
            dataset.trained_tokens,
            prompts,
            tuple(truncations(*found, opener.seq_len, prompts=bool(prompts))),
        )

    return {"train": of(train), "valid": of(valid)}


# --- lengths and languages ------------------------------------------------------------------------


def lengths(values_R: NDArray[np.int64], rows_R: NDArray[np.int64]) -> Lengths:
    """Args:
    values_R, rows_R: int64; lengths, in rising order, and how many rows have each.
    """
    if not len(values_R):
        return Lengths(0, 0.0, 0, dict.fromkeys(PERCENTILES, 0))
    reached_R = np.cumsum(rows_R)
    rows, total = int(reached_R[-1]), int(values_R @ rows_R)
    found = values_R[np.searchsorted(reached_R, _ranks(rows))].tolist()
    return Lengths(
        total, total / rows, int(values_R[-1]), dict(zip(PERCENTILES, found, strict=True))
    )


def spread(values: Sequence[float]) -> Spread:
    """Summarise at least one finite number."""
    sorted_R = np.sort(np.asarray(values, np.float64))
    found = sorted_R[np.array(_ranks(len(values))) - 1].tolist()
    mean, smallest, largest = float(sorted_R.mean()), float(sorted_R[0]), float(sorted_R[-1])
    return Spread(len(values), mean, smallest, largest, dict(zip(PERCENTILES, found, strict=True)))


def _ranks(rows: int) -> list[int]:
    """Nearest ranks of the percentiles among so many rows, from 1."""
    return [max(1, -(-rows * p // 100)) for p in PERCENTILES]


def truncations(
    values_R: NDArray[np.int64], rows_R: NDArray[np.int64], seq_len: int, *, prompts: bool = False
) -> list[Truncation]:
    """At `seq_len`, and at each power of two from 512 up to where nothing is cut any more; prompts
    are dropped, also at the limit itself."""
    longest = int(values_R.max(initial=0)) + prompts
    limits = [limit for limit in LIMITS if limit < longest]
    limits += [limit for limit in LIMITS if limit >= longest][:1]
    found = []
    for limit in sorted({*limits, seq_len}):
        over_R = values_R >= limit if prompts else values_R > limit
        lost_R = values_R[over_R] - (0 if prompts else limit)
        rows = int(rows_R[over_R].sum())
        found.append(Truncation(limit, rows, int((lost_R * rows_R[over_R]).sum())))
    return found


def histogram(found: Mapping[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths in rising order, and rows of each."""
    pairs = sorted(found.items())
    return (
        np.array([length for length, _ in pairs], np.int64),
        np.array([rows for _, rows in pairs], np.int64),
    )


def language_mix(texts: Sequence[str]) -> Counter[str]:
    """Language, by py3langid -> texts; "unclear" for few letters or an unsure answer."""
    identifier = _identifier()
    found: Counter[str] = Counter()
    for text in texts:
        name, probability = identifier.classify(text)
        sure = _letters(text) >= _LEAST_LETTERS and probability >= _LEAST_PROBABLE
        found[str(name) if sure else UNCLEAR] += 1
    return found


@cache
def _identifier() -> Any:
    """The model; loading it takes most of a second."""
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text[:200]))
