"""An objective at work: its weights for the batches of a step, and reference log-probabilities.

    score      log-probabilities of every batch
    weigh      the objective's weights, from all groups of the step
    accumulate the gradient, with these weights

A backend with the capability `one-pass` weighs each batch between the forward of its body and the
backward of its head, if the objective can look at a batch alone.

What another model says of a run's documents is computed once for each data set and cached. It is
the base, or the adapter that training starts from, as the reference of an objective; or a
teacher. Its log-probabilities follow from the model, the documents, and how the backend and its
libraries compute; the name of an entry is the digest of all that.

Shape legend: T tokens of a batch, K trained positions of a document, M targets of a position. Where
positions have several targets, T and K stand for two dimensions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vox_core import files
from vox_core.cache import CACHE_VERSION, cached
from vox_core.contract import Batch, Model, Notice, Objective, Place, Side, Totals, Weighed
from vox_core.data.audit import vocabulary_of
from vox_core.data.batching import to_batch
from vox_core.data.dataset import Dataset
from vox_core.digests import config_digest
from vox_core.errors import TrainingError
from vox_core.host.load import Observe, foreign_errors
from vox_core.run.artifacts import versions
from vox_core.run.start import REFERENCE

if TYPE_CHECKING:
    from vox_core.contract import Floats, Ints
    from vox_core.run.run_plan import RunPlan


Groups = Sequence[Sequence[Place]]
_POSITIONS = 64
"""Rows of logits that are copied at once."""


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Loss, metrics with the number of values that each is the mean of, and the weights of every
    batch, (T,) each."""

    loss: float
    metrics: Mapping[str, float]
    counts: Mapping[str, int]
    weights: Sequence[Floats]


def totals_of(batches: Sequence[Batch], groups: Groups) -> Totals:
    documents, tokens = Counter[str](), Counter[str]()
    for place in (place for group in groups for place in group):
        documents[place.label] += 1
        tokens[place.label] += int(batches[place.batch].trained_T[place.extent].sum())
    return Totals(len(groups), documents, tokens)


def total_weight(batches: Sequence[Batch]) -> float:
    """Return the total weight of a step: a power of two near its number of trained tokens.

    An objective's weights are shares of a mean. Times this they are as large as those of supervised
    training, so that gradients do not underflow in float16; the update divides by it, exactly.
    """
    trained = sum(int(batch.trained_T.sum()) for batch in batches)
    return 2.0 ** round(math.log2(max(1, trained)))


def weigh(
    objective: Objective,
    batches: Sequence[Batch],
    groups: Groups,
    log_probs: Sequence[Floats],
    totals: Totals,
) -> StepWeights:
    """Weigh the groups of some batches.

    Args:
        log_probs: of each batch, (T,).

    Raises:
        TrainingError: T003, the objective returned weights of another shape.
        PluginError: X001, the objective raised something of its own.
    """
    sides = [
        [_side(batches[place.batch], place, log_probs[place.batch]) for place in group]
        for group in groups
    ]
    guard = foreign_errors(type(objective).__name__, "weigh", "objective")
    with guard if objective.foreign else contextlib.nullcontext():
        weighed: object = objective.weigh(sides, totals)
        if not isinstance(weighed, Weighed):
            raise TypeError(f"it returned a {type(weighed).__name__}, expected Weighed")
        loss = float(weighed.loss)
    weights = [np.zeros(batch.targets_T.shape, np.float32) for batch in batches]
    _require_shapes(objective, weighed, sides)
    for group, of_group in zip(groups, weighed.weights, strict=True):
        for place, weights_K in zip(group, of_group, strict=True):
            trained_T = batches[place.batch].trained_T[place.extent]
            weights[place.batch][place.extent][trained_T] = weights_K
    metrics = {name: float(value) for name, value in weighed.metrics.items()}
    counts = {name: weighed.counts.get(name, len(groups)) for name in metrics}
    return StepWeights(loss, metrics, counts, weights)


def by_batch(groups: Groups, batches: int) -> Iterator[list[tuple[Place, ...]]]:
    """Yield the groups of each batch, as if it were the only one."""
    for number in range(batches):
        yield [
            tuple(replace(place, batch=0) for place in group)
            for group in groups
            if group[0].batch == number
        ]


def weighted(batch: Batch, weights_T: Floats) -> Batch:
    """The batch with an objective's weights, of which some may be 0."""
    return Batch(batch.tokens_T, batch.targets_T, weights_T, batch.starts_D)


def mean_metrics(outcomes: Sequence[StepWeights]) -> dict[str, float]:
    """Combine the metrics of parts of a step, each as the mean over all its values."""
    sums, counts = dict[str, float](), Counter[str]()
    for outcome in outcomes:
        for name, value in outcome.metrics.items():
            sums[name] = sums.get(name, 0.0) + outcome.counts[name] * value
            counts[name] += outcome.counts[name]
    return {name: total / counts[name] for name, total in sums.items()}


def reference_log_probs(
    model: Model, adapter: str | None, dataset: Dataset, micro_batch_tokens: int
) -> Iterator[Floats]:
    """Yield the log-probabilities at the trained positions of each document, in order."""
    start = 0
    while start < len(dataset):
        stop, tokens = start, 0
        while stop < len(dataset) and (stop == start or tokens < micro_batch_tokens):
            tokens += int(dataset.lengths_D[stop])
            stop += 1
        batch = to_batch(dataset[start:stop])
        log_probs_T = model.log_probs(batch, adapter)
        for extent in batch.documents():
            yield log_probs_T[extent][batch.trained_T[extent]]
        start = stop


def most_likely(
    model: Model, adapter: str | None, dataset: Dataset, count: int, vocabulary: int | None
) -> Iterator[tuple[Ints, Floats]]:
    """Yield the most likely tokens at the trained positions of each document, int64 (K, M), and
    their log-probabilities, float32; the most likely first, of equals the lower id.

    Args:
        vocabulary: of the model that learns; tokens beyond it are not chosen.
    """
    for number in range(len(dataset)):
        batch = to_batch(dataset[number : number + 1])
        logits_KV = model.logits(batch.tokens_T, adapter)[batch.trained_T]
        starts = range(0, len(logits_KV), _POSITIONS)
        parts = [_best(logits_KV[at : at + _POSITIONS, :vocabulary], count) for at in starts]
        targets, log_probs = zip(*parts, strict=True)
        yield np.concatenate(targets), np.concatenate(log_probs)


def _best(logits_KV: Floats, count: int) -> tuple[Ints, Floats]:
    best = []
    for logits_V in logits_KV:
        ids = np.flatnonzero(logits_V >= np.partition(logits_V, -count)[-count])
        best.append(ids[np.argsort(-logits_V[ids], kind="stable")[:count]])
    best_KM, highest_K1 = np.stack(best), logits_KV.max(1, keepdims=True)
    sums_K1 = np.exp(logits_KV - highest_K1).sum(1, dtype=np.float64, keepdims=True)
    log_probs_KM = np.take_along_axis(logits_KV, best_KM, 1) - highest_K1 - np.log(sums_K1)
    return best_KM, log_probs_KM.astype(np.float32)


def _side(batch: Batch, place: Place, log_probs_T: Floats) -> Side:
    log_probs_K = log_probs_T[place.extent][batch.trained_T[place.extent]]
    return Side(place.label, log_probs_K, place.reference_K, place.sampled_K, place.reward)


def _require_shapes(
    objective: Objective, weighed: Weighed, sides: Sequence[Sequence[Side]]
) -> None:
    found = [[np.shape(weights_K) for weights_K in group] for group in weighed.weights]
    expected = [[side.log_probs_K.shape for side in group] for group in sides]
    if found != expected:
        raise TrainingError(
            "T003",
            "the objective returned weights of a wrong shape",
            where=f"{type(objective).__name__}.weigh",
            found=_shown(found),
            expected=f"{_shown(expected)}, one weight for each log-probability",
            remedy="report it to the authors of the objective's plugin",
        )


def _shown(shapes: Sequence[Sequence[tuple[int, ...]]]) -> str:
    first = f", of shapes {list(shapes[0])} in the first" if shapes else ""
    return f"{len(shapes)} group{'' if len(shapes) == 1 else 's'}{first}"


KIND, _SCORES, _TARGETS = "reference", "log_probs.npy", "targets.npy"


class Scores:
    """Log-probabilities at the trained positions of each document, by its index.

    Args:
        log_probs: of all documents, float32, (K,) or (K, M); read from the disk on access.
        targets: whose they are, int32 (K, M); None: of the documents' own tokens.
    """

    def __init__(
        self, dataset: Dataset, log_probs: Floats, targets: Ints | None, owner: object = None
    ) -> None:
        self._log_probs, self._targets, self._owner = log_probs, targets, owner
        self._starts_D1 = np.concatenate([[0], np.cumsum(dataset.trained_D())])

    def log_probs(self, documents: Iterable[int]) -> list[Floats]:
        return [self._log_probs[self._at(document)] for document in documents]

    def targets(self, documents: Iterable[int]) -> list[Ints]:
        """Return the targets of each of these documents; nothing if they are its own tokens."""
        if self._targets is None:
            return []
        return [self._targets[self._at(document)] for document in documents]

    def _at(self, document: int) -> slice:
        return slice(*self._starts_D1[document : document + 2])


def scores_of(run: RunPlan, dataset: Dataset, opened: Callable[[], Model], emit: Observe) -> Scores:
    """Take the scores of a data set from the cache, or compute them with the model that `opened`
    returns: the teacher's if the run has one, and else the base."""
    plan, adapter = run.execution, run.inputs.reference_adapter
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
    whose = "teacher" if run.inputs.teacher else "reference"
    shape = (int(dataset.trained_D().sum()), *[top_k] * bool(top_k))

    def make(folder: Path) -> None:
        emit(Notice(f"computing the {whose}'s log-probabilities of {len(dataset)} documents"))
        model = opened()
        name = REFERENCE if adapter else None
        with contextlib.ExitStack() as stack:
            if adapter:
                model.add_adapter(REFERENCE, adapter)
                stack.callback(model.remove_adapter, REFERENCE)
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
