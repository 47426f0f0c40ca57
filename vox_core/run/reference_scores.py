"""What another model says of a run's documents, computed once for each data set and cached.

It is the base, or the adapter that training starts from, as the reference of an objective; or a
teacher. Its log-probabilities follow from the model, the documents, and how the backend and its
libraries compute; the name of an entry is the digest of all that.

Shape legend: K trained positions of a document, M targets of a position.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vox_core import files
from vox_core.cache import CACHE_VERSION, cached
from vox_core.contract import AdapterState, Model, Notice
from vox_core.data.audit import vocabulary_of
from vox_core.data.dataset import Dataset
from vox_core.digests import config_digest
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
        log_probs: of all documents, float32, (K,) or (K, M); read from the disk on access.
        targets: whose they are, int32 (K, M); None: of the documents' own tokens.
        owner: of the files.
    """

    def __init__(
        self, dataset: Dataset, log_probs: Floats, targets: Ints | None, owner: object = None
    ) -> None:
        self._log_probs, self._targets, self._owner = log_probs, targets, owner
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
        "documents": dataset.digest,
        "dtype": plan.dtype,
        "backend": [plan.backend, plan.backend_version, plan.device],
        "versions": versions(run.inputs.backend),
        "version": CACHE_VERSION,
    }
    vocabulary = vocabulary_of(run.inputs.config)
    decides |= (
        {"top_k": top_k, "vocabulary": vocabulary}
        if top_k
        else {"micro_batch_tokens": plan.micro_batch_tokens}
    )
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    whose = "teacher" if teacher else "reference"
    source = teacher or start
    adapter = source.adapter if source else None
    shape = (int(dataset.trained_D().sum()), *[top_k] * bool(top_k))

    def make(folder: Path) -> None:
        emit(Notice(f"computing the {whose}'s log-probabilities of {len(dataset)} documents"))
        model = opened()
        with _with_adapter(model, adapter) as name:
            if top_k:
                pairs = most_likely(model, name, dataset, top_k, vocabulary)
                _write(folder, shape, {_TARGETS: np.int32, _SCORES: np.float32}, pairs)
            else:
                scores = reference_log_probs(model, name, dataset, plan.micro_batch_tokens)
                _write(folder, shape, {_SCORES: np.float32}, ((each,) for each in scores))

    def read(folder: Path, owner: object) -> Scores | None:
        names = [_SCORES, _TARGETS] if top_k else [_SCORES]
        try:
            arrays = [np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in names]
        except (OSError, ValueError):
            return None
        if {array.shape for array in arrays} != {shape}:
            return None
        return Scores(dataset, arrays[0], arrays[1] if top_k else None, owner)

    return cached(KIND, key, make, read).value


def _identity(run: RunPlan) -> dict[str, object]:
    """Return what names the model that scores, and how it is loaded."""
    contract, teacher, start = run.contract, run.inputs.teacher, run.inputs.start
    if teacher:
        config = config_digest(teacher.base.path)
        return {"teacher": teacher.digest(), "config": config, "quant": teacher.quant}
    found: dict[str, object] = {
        "model": contract.model.weights_digest,
        "config": contract.model.config_digest,
        "quant": contract.quant,
    }
    return found | ({"adapter": start.digest} if start else {})


@contextlib.contextmanager
def _with_adapter(model: Model, adapter: AdapterState | None) -> Iterator[str | None]:
    """Yield the name of `adapter` in `model`, which has it for that time."""
    if adapter is None:
        yield None
        return
    model.add_adapter(REFERENCE, adapter)
    try:
        yield REFERENCE
    finally:
        model.remove_adapter(REFERENCE)


def _write(
    folder: Path,
    shape: tuple[int, ...],
    names: Mapping[str, type[np.generic]],
    parts: Iterable[Sequence[Floats | Ints]],
) -> None:
    """Write arrays of one shape as `.npy` files, part by part."""
    with files.storage_errors(folder), contextlib.ExitStack() as stack:
        opened = [stack.enter_context((folder / name).open("wb")) for name in names]
        for file, dtype in zip(opened, names.values(), strict=True):
            about = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, about)
        for part in parts:
            for file, dtype, array in zip(opened, names.values(), part, strict=True):
                file.write(array.astype(dtype).tobytes())
