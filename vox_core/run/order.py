"""The order that the settings ask for, of the data set that they name."""

from __future__ import annotations

import numpy as np

from vox_core.config import DataSource, TrainSettings
from vox_core.data.dataset import Dataset
from vox_core.data.sampler import Ordering, filled, sources_of
from vox_core.data.split import find_split
from vox_core.errors import DataError


def in_order(dataset: Dataset, settings: TrainSettings) -> Dataset:
    """The data set in the order of `--source` and `--curriculum`.

    Raises:
        DataError: D031, no row says how difficult it is; D032, a source would never be trained.
    """
    if not settings.source and settings.curriculum == "none":
        return dataset
    documents, notes = dataset.documents, list[str]()
    sources_D = levels_D = None
    if settings.source:
        sources_D = sources_of(documents.files_D, _source_of_each_file(settings.source))
    if settings.curriculum == "difficulty":
        unknown = int(np.isnan(documents.difficulty_D).sum())
        _require_some_difficulty(len(documents) - unknown)
        levels_D = filled(documents.difficulty_D)
        if unknown:
            notes.append(
                f"{unknown} of {len(documents)} documents do not say how difficult they are, and "
                "are trained among those of the middle"
            )
    weights = tuple(source.weight for source in settings.source)
    ordering = Ordering(len(documents), weights, sources_D, levels_D)
    if settings.source:
        _require_all_trained(ordering, settings.source)
    return dataset.ordered(ordering, tuple(notes))


def _source_of_each_file(sources: tuple[DataSource, ...]) -> list[int]:
    """The number of the source that brings each file; a source may bring several."""
    found = [find_split([source.path])[0] for source in sources]
    # By place: two sources may bring the same file, which is read for each.
    return [number for number, paths in enumerate(found) for _ in paths]


def _require_some_difficulty(known: int) -> None:
    if not known:
        raise DataError(
            "D031",
            "no row says how difficult it is",
            where="--curriculum difficulty",
            found="no field `difficulty` that is a number or a word such as easy, medium, hard",
            expected="at least some rows with one",
            remedy="leave out --curriculum, or write `difficulty` into the rows",
        )


def _require_all_trained(ordering: Ordering, sources: tuple[DataSource, ...]) -> None:
    assert ordering.sources_D is not None
    there = np.bincount(ordering.sources_D, minlength=len(sources)).tolist()
    columns = zip(sources, there, ordering.counts(), strict=True)
    faults = [
        f"{source.path}: " + ("no document" if not rows else f"weight {source.weight:g} is too low")
        for source, rows, count in columns
        if not rows or not count
    ]
    if faults:
        raise DataError(
            "D032",
            "a source has a weight and would never be trained",
            where="--source",
            found=f"an epoch of {ordering.documents} documents",
            expected="at least one document of every source in each epoch",
            faults=faults,
            remedy="leave out this source, or give it a larger weight",
        )
