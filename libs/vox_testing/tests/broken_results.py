"""Ways to break merging, loading and generation.

Each stands before the right hook and is given it: `merge(right, job)`, `load(right, job)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from vox_core.contract import (
    AdapterState,
    LoadedModel,
    LoadJob,
    MergeJob,
    MergeResult,
    Sampling,
)
from vox_core.errors import VoxError

Merge = Callable[[MergeJob], MergeResult]
Load = Callable[[LoadJob], LoadedModel]


# --- merging and loading --------------------------------------------------------------------------


def merging(change: Callable[[AdapterState], AdapterState]) -> Any:
    return lambda right, job: right(replace(job, adapter=change(job.adapter)))


def eagerly(right: Merge, job: MergeJob) -> MergeResult:
    return MergeResult(iter(list(right(job).tensors)))


def out_of_order(right: Merge, job: MergeJob) -> MergeResult:
    return right(replace(job, targets=job.targets[::-1]))


def in_float32(right: Merge, job: MergeJob) -> MergeResult:
    return MergeResult((name, value.astype(np.float32)) for name, value in right(job).tensors)


def loading(change: Callable[[AdapterState], AdapterState | None]) -> Any:
    def load(right: Load, job: LoadJob) -> LoadedModel:
        return right(replace(job, adapter=change(job.adapter) if job.adapter else None))

    return load


def loads_in_float32(right: Load, job: LoadJob) -> LoadedModel:
    return right(replace(job, dtype="fp32"))


def foreign_errors(right: Load, job: LoadJob) -> LoadedModel:
    try:
        return right(job)
    except VoxError as error:
        raise ValueError(error.found) from error


class Answering:
    """A loaded model that answers otherwise."""

    def __init__(self, model: LoadedModel, generate: Any = None, logits: Any = None) -> None:
        self._model = model
        self._generate, self._logits = generate, logits

    def generate(self, tokens_T: Any, sampling: Sampling) -> Iterator[int]:
        change = self._generate
        return (
            change(self._model, tokens_T, sampling) if change else self._right(tokens_T, sampling)
        )

    def _right(self, tokens_T: Any, sampling: Sampling) -> Iterator[int]:
        return self._model.generate(tokens_T, sampling)

    def logits(self, tokens_T: Any) -> Any:
        logits_TV = self._model.logits(tokens_T)
        return self._logits(logits_TV) if self._logits else logits_TV

    def close(self) -> None:
        self._model.close()


def answering(**changes: Any) -> Any:
    return lambda right, job: Answering(right(job), **changes)


def sampling_with(**changes: Any) -> Any:
    return answering(
        generate=lambda model, tokens_T, sampling: model.generate(
            tokens_T, replace(sampling, **changes)
        )
    )


def one_too_many(model: LoadedModel, tokens_T: Any, sampling: Sampling) -> Iterator[int]:
    return model.generate(tokens_T, replace(sampling, max_tokens=sampling.max_tokens + 1))


def all_at_once(model: LoadedModel, tokens_T: Any, sampling: Sampling) -> Iterator[int]:
    return iter(list(model.generate(tokens_T, sampling)))


def astray_after(count: int) -> Any:
    """Greedy tokens, of which those after the first `count` are wrong."""

    def generate(model: LoadedModel, tokens_T: Any, sampling: Sampling) -> Iterator[int]:
        for number, token in enumerate(model.generate(tokens_T, sampling)):
            yield token if number < count else (token + 1) % 256

    return generate


def of_the_last(count: int) -> Any:
    return lambda model, tokens_T, sampling: model.generate(tokens_T[-count:], sampling)
