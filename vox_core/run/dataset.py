"""Data files -> tokens, masks and order, as a run trains on them, and the audits of the masks.

Nothing is written but the cache of tokens. `vox data preview` and `vox data stats` open data sets
in the same way, without a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core import bounded_json
from vox_core.contract import SFT, ObjectiveSpec
from vox_core.data.audit import Audit, audit, require_sound, vocabulary_of
from vox_core.data.dataset import Dataset, assumed_dataset
from vox_core.data.dataset_cache import open_dataset
from vox_core.data.sampler import Ordering, filled
from vox_core.data.split import find_split
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import DataError
from vox_core.run import plan
from vox_core.run.sources import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vox_core import models
    from vox_core.config import DataSource, TrainSettings
    from vox_core.data.checked import CheckedFile
    from vox_core.run.inputs import RunInputs


@dataclass(frozen=True, slots=True)
class Datasets:
    """What a run trains on, and what it is validated on.

    Args:
        audits: what was found of the masks; by training and validation.
    """

    train: Dataset
    valid: Dataset | None
    audits: Mapping[str, Audit] = field(default_factory=dict)


def build_datasets(settings: TrainSettings, inputs: RunInputs) -> Datasets:
    """Both data sets, from the cache or made now.

    Without data files, as only a plan can be, one step of documents of `seq_len` tokens is assumed.

    Raises:
        DataError: nothing can be trained, or the order cannot be had.
    """
    if not settings.data:
        assumed = assumed_dataset(settings.batch_size, inputs.seq_len)
        return Datasets(in_order(assumed, settings), None)
    opener = Opener(inputs.model, inputs.config, inputs.seq_len, settings.objective_spec)
    held_out = inputs.rows.valid
    train = in_order(opener.open(inputs.rows.train), settings)
    valid = opener.open(held_out) if held_out else None
    audits = opener.audits(train, valid)
    require_sound(audits)
    return Datasets(train, valid, audits)


@dataclass(frozen=True)
class Opener:
    """What files are opened with.

    Args:
        config: the model's config.json.
        objective: decides which documents a row makes.
    """

    model: models.LocalModel
    config: Mapping[str, Any]
    seq_len: int
    objective: ObjectiveSpec = SFT

    @classmethod
    def of(cls, settings: TrainSettings, progress: models.Progress | None = None) -> Opener:
        """With the model of the settings.

        Raises:
            InputError: it cannot be had, or not be read.
        """
        model = resolve_model(
            settings.model,
            revision=settings.revision,
            template=settings.template,
            progress=progress,
        )
        config = bounded_json.read(model.path / "config.json")
        length = plan.sequence_length(settings, config)
        return cls(model, config, length, settings.objective_spec)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.model.tokenizer)

    def open(
        self, files: Sequence[CheckedFile], progress: Callable[[int, int], None] | None = None
    ) -> Dataset:
        """The data set, from the cache or made now; see `open_dataset`."""
        return open_dataset(
            files,
            self.model.tokenizer,
            lambda: self.tokenizer,
            self.seq_len,
            self.objective,
            progress=progress,
        )

    def audits(self, train: Dataset, valid: Dataset | None = None) -> dict[str, Audit]:
        """Audits of the masks, by `training` and `validation` as far as there are rows."""
        vocabulary = vocabulary_of(self.config)
        both = {"training": train, "validation": valid}
        return {what: audit(dataset, vocabulary) for what, dataset in both.items() if dataset}


def in_order(dataset: Dataset, settings: TrainSettings) -> Dataset:
    """The data set in the order of `--source` and `--curriculum`.

    Raises:
        DataError: D031, no row says how difficult it is; D032, a source would never be trained.
    """
    if not settings.source and settings.curriculum == "none":
        return dataset
    first_G = dataset.starts_G1[:-1]
    sources_G, levels_G, notes = None, None, tuple[str, ...]()
    if settings.source:
        found = [find_split([source.path])[0] for source in settings.source]
        # By place: two sources may bring the same file, which is read for each.
        numbers = [number for number, paths in enumerate(found) for _ in paths]
        sources_G = np.array(numbers, np.int32)[dataset.files_D[first_G]]
    if settings.curriculum == "difficulty":
        difficulty_G = dataset.difficulty_D[first_G]
        unknown = int(np.isnan(difficulty_G).sum())
        _require_some_difficulty(dataset.groups - unknown)
        levels_G = filled(difficulty_G)
        if unknown:
            said = f"{unknown} of {dataset.groups} documents do not say how difficult they are, and"
            notes = (f"{said} are trained among those of the middle",)
    weights = tuple(source.weight for source in settings.source)
    ordering = Ordering(dataset.groups, weights, sources_G, levels_G)
    if settings.source:
        _require_all_trained(ordering, settings.source)
    return dataset.ordered(ordering, notes)


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
