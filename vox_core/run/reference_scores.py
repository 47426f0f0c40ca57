"""What another model says of a run's documents, computed once for each data set and cached.

It is the base, or the adapter that training starts from, as the reference of an objective; or a
teacher. Its log-probabilities follow from the model, the documents, and how the backend and its
libraries compute; the name of an entry is the digest of all that.

Shape legend: K trained positions of a document, M targets of a position.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vox_core import files
from vox_core.cache import CACHE_VERSION, cached
from vox_core.contract import Model, Notice
from vox_core.data.audit import vocabulary_of
from vox_core.data.dataset import Dataset
from vox_core.run.artifacts import versions
from vox_core.run.context import Observe
from vox_core.run.objective import most_likely, reference_log_probs
from vox_core.run.start import REFERENCE

if TYPE_CHECKING:
    from vox_core.contract import Floats, Ints
    from vox_core.run.run_plan import RunPlan

KIND, _SCORES, _TARGETS = "reference", "log_probs.npy", "targets.npy"


class Scores:
    """Log-probabilities at the trained positions of each document, by its index.

    Args:
        log_probs: of all documents, float32, (K,) or (K, M).
        targets: whose they are, integers (K, M); None: of the documents' own tokens.
    """

    def __init__(self, dataset: Dataset, log_probs: Floats, targets: Ints | None) -> None:
        self._log_probs, self._targets = log_probs, targets
        self._starts_D1 = np.concatenate([[0], np.cumsum(dataset.trained_D())])

    def log_probs(self, documents: Iterable[int]) -> list[Floats]:
        """Return those of each of these documents."""
        return [self._log_probs[self._at(document)] for document in documents]

    def targets(self, documents: Iterable[int]) -> list[Ints]:
        """Return the targets of each of these documents; nothing if they are its own tokens."""
        if self._targets is None:
            return []
        return [self._targets[self._at(document)] for document in documents]

    def _at(self, document: int) -> slice:
        return slice(*self._starts_D1[document : document + 2])


@dataclass(frozen=True, slots=True)
class References:
    """Scores of the training and the validation documents; without validation documents `valid` is
    that of training."""

    train: Scores
    valid: Scores

    @classmethod
    def of(cls, plan: RunPlan, opened: Callable[[], Model], emit: Observe) -> References:
        """Take them from the cache, or compute them with the model that `opened` returns: the
        teacher's if the run has one, and else the base."""
        train, valid = plan.data.train, plan.data.valid
        scores = _scores(plan, opened, train, emit)
        held_out = _scores(plan, opened, valid, emit) if valid else scores
        return cls(scores, held_out)


def _scores(run: RunPlan, opened: Callable[[], Model], dataset: Dataset, emit: Observe) -> Scores:
    plan, teacher, start = run.execution, run.inputs.teacher, run.inputs.start
    top_k = run.inputs.objective.top_k if run.inputs.objective else 0
    decides = {
        **_identity(run),
        "top_k": top_k,
        "documents": dataset.digest,
        "dtype": plan.dtype,
        "backend": [plan.backend, plan.backend_version, plan.device],
        "micro_batch_tokens": plan.micro_batch_tokens,
        "versions": versions(run.inputs.backend),
        "version": CACHE_VERSION,
    }
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    whose = "teacher" if teacher else "reference"
    adapter = teacher.adapter if teacher else start and start.adapter

    def make(folder: Path) -> None:
        emit(Notice(f"computing the {whose}'s log-probabilities of {len(dataset)} documents"))
        name, model = REFERENCE if adapter else None, opened()
        if adapter:
            model.add_adapter(REFERENCE, adapter)
        if top_k:
            vocabulary = vocabulary_of(run.inputs.config)
            pairs = list(most_likely(model, name, dataset, top_k, vocabulary))
            targets, scores = zip(*pairs, strict=True)
            _save(folder / _TARGETS, np.concatenate(targets))
        else:
            scores = tuple(reference_log_probs(model, name, dataset, plan.micro_batch_tokens))
        _save(folder / _SCORES, np.concatenate(scores))
        if adapter:
            model.remove_adapter(REFERENCE)

    def read(folder: Path, _owner: object) -> Scores | None:
        shape = (int(dataset.trained_D().sum()), *[top_k] * bool(top_k))
        try:
            log_probs = np.load(folder / _SCORES, allow_pickle=False)
            targets = np.load(folder / _TARGETS, allow_pickle=False) if top_k else None
        except (OSError, ValueError):
            return None
        found = [log_probs] if targets is None else [log_probs, targets]
        return Scores(dataset, log_probs, targets) if {a.shape for a in found} == {shape} else None

    return cached(KIND, key, make, read).value


def _identity(run: RunPlan) -> dict[str, object]:
    """Return what names the model that scores, and how it is loaded."""
    contract, teacher, start = run.contract, run.inputs.teacher, run.inputs.start
    if teacher:
        return {"teacher": teacher.digest(), "quant": teacher.quant}
    found: dict[str, object] = {
        "model": contract.model.weights_digest,
        "config": contract.model.config_digest,
        "quant": contract.quant,
    }
    return found | ({"adapter": start.digest} if start else {})


def _save(path: Path, array: Floats | Ints) -> None:
    with files.storage_errors(path.parent), path.open("wb") as file:
        np.save(file, array)
