"""Log-probabilities of a reference model, computed once for each data set and kept in the cache.

The reference is the base. Its log-probabilities follow from the base, the documents, and how the
backend and its libraries compute; the name of an entry is the digest of all that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vox_core import files
from vox_core.cache import CACHE_VERSION, cached
from vox_core.contract import Model, Notice
from vox_core.data.dataset import Dataset
from vox_core.run.artifacts import versions
from vox_core.run.context import Observe
from vox_core.run.objective import reference_log_probs
from vox_core.run.start import REFERENCE

if TYPE_CHECKING:
    from vox_core.contract import Floats
    from vox_core.run.run_plan import RunPlan

KIND, _SCORES = "reference", "log_probs.npy"


class Scores:
    """Log-probabilities at the trained positions of each document, by its index."""

    def __init__(self, log_probs: Floats, dataset: Dataset) -> None:
        self._log_probs = log_probs
        self._starts_D1 = np.concatenate([[0], np.cumsum(dataset.trained_D())])

    def __getitem__(self, document: int) -> Floats:
        start, stop = self._starts_D1[document : document + 2]
        return self._log_probs[start:stop]


@dataclass(frozen=True, slots=True)
class References:
    """Scores of the training and the validation documents by the base, or by the adapter that
    training starts from; without validation documents `valid` is that of training."""

    train: Scores
    valid: Scores

    @classmethod
    def of(cls, plan: RunPlan, opened: Callable[[], Model], emit: Observe) -> References:
        """Take them from the cache, or compute them with the model that `opened` returns."""
        train, valid = plan.data.train, plan.data.valid
        scores = _scores(plan, opened, train, emit)
        held_out = _scores(plan, opened, valid, emit) if valid else scores
        return cls(scores, held_out)


def _scores(run: RunPlan, opened: Callable[[], Model], dataset: Dataset, emit: Observe) -> Scores:
    plan, contract, start = run.execution, run.contract, run.inputs.start
    decides = {
        "model": contract.model.weights_digest,
        "config": contract.model.config_digest,
        "documents": dataset.digest,
        "quant": contract.quant,
        "dtype": plan.dtype,
        "backend": [plan.backend, plan.backend_version, plan.device],
        "micro_batch_tokens": plan.micro_batch_tokens,
        "versions": versions(run.inputs.backend),
        "version": CACHE_VERSION,
    }
    if start:
        decides["adapter"] = start.digest
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def make(folder: Path) -> None:
        emit(Notice(f"computing the reference's log-probabilities of {len(dataset)} documents"))
        name, model = REFERENCE if start else None, opened()
        if start:
            model.add_adapter(REFERENCE, start.adapter)
        scores = reference_log_probs(model, name, dataset, plan.micro_batch_tokens)
        every = np.concatenate([np.zeros(0, np.float32), *scores])
        if start:
            model.remove_adapter(REFERENCE)
        with files.storage_errors(folder), (folder / _SCORES).open("wb") as file:
            np.save(file, every)

    def read(folder: Path, _owner: object) -> Floats | None:
        try:
            found: Floats = np.load(folder / _SCORES, allow_pickle=False)
        except (OSError, ValueError):
            return None
        return found if found.shape == (int(dataset.trained_D().sum()),) else None

    return Scores(cached(KIND, key, make, read).value, dataset)
