"""Data files -> data sets as `vox train` opens them under the same settings, and their audits.

For commands that look at data and start no run; `prepare.py` goes its own way, past a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vox_core import bounded_json, models
from vox_core.config import TrainSettings
from vox_core.data.audit import Audit, audit, vocabulary_of
from vox_core.data.checked import CheckedFile
from vox_core.data.dataset import Dataset
from vox_core.data.dataset_cache import Load, open_dataset
from vox_core.data.tokenizer import load_tokenizer
from vox_core.run import plan
from vox_core.run.sources import resolve_model


@dataclass(frozen=True, slots=True)
class Opener:
    """What files are opened with.

    Args:
        config: the model's config.json.
        load: the tokenizer, once.
    """

    model: models.LocalModel
    config: Mapping[str, Any]
    seq_len: int
    load: Load

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
        seq_len = plan.sequence_length(settings, config)
        return cls(model, config, seq_len, cache(lambda: load_tokenizer(model.tokenizer)))

    def open(
        self, files: Sequence[CheckedFile], progress: Callable[[int, int], None] | None = None
    ) -> Dataset:
        """The data set, from the cache or made now; see `open_dataset`."""
        folder = self.model.tokenizer
        return open_dataset(files, folder, self.load, self.seq_len, progress=progress)

    def audit(self, dataset: Dataset, sources: Sequence[Path]) -> Audit:
        """What is found of the masks."""
        return audit(dataset, sources, vocabulary_of(self.config))


def audits_of(
    config: Mapping[str, Any], *looked_at: tuple[Dataset | None, Sequence[CheckedFile]]
) -> dict[str, Audit]:
    """By training and validation, as far as there are rows.

    Args:
        looked_at: a data set and its files; of training, then of validation.
    """
    vocabulary = vocabulary_of(config)
    return {
        what: audit(dataset, [file.path for file in files], vocabulary)
        for what, (dataset, files) in zip(("training", "validation"), looked_at, strict=True)
        if dataset
    }
