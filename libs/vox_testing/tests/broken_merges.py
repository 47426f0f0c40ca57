"""Ways to break merging: each stands before the right hook, and is given it with the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core.contract import AdapterState, MergeJob, MergeResult
from vox_core.weights import numpy_dtype

if TYPE_CHECKING:
    from libs.vox_testing.tests.mutant import Merge


def merging(change: Callable[[AdapterState], AdapterState]) -> Any:
    return lambda right, job: right(replace(job, adapter=change(job.adapter)))


def eagerly(right: Merge, job: MergeJob) -> MergeResult:
    return MergeResult(iter(list(right(job).tensors)))


def out_of_order(right: Merge, job: MergeJob) -> MergeResult:
    return right(replace(job, targets=job.targets[::-1]))


def in_float32(right: Merge, job: MergeJob) -> MergeResult:
    return MergeResult((name, value.astype(np.float32)) for name, value in right(job).tensors)


def in_its_own_dtype(right: Merge, job: MergeJob) -> MergeResult:
    return right(replace(job, dtype=None))


def rounded_to_the_base(right: Merge, job: MergeJob) -> MergeResult:
    """Rounded to the base's dtype, then to the one asked for."""

    def tensors() -> Iterator[tuple[str, Any]]:
        for name, value in right(job).tensors:
            yield name, value.astype(job.read(name).dtype).astype(value.dtype)

    return MergeResult(tensors())


def without_whole_tensors(right: Merge, job: MergeJob) -> MergeResult:
    def tensors() -> Iterator[tuple[str, Any]]:
        for target, (name, value) in zip(job.targets, right(job).tensors, strict=True):
            yield name, job.read(name) if target.path in job.adapter.saved else value

    return MergeResult(tensors())


def rounded(adapter: AdapterState) -> AdapterState:
    short = numpy_dtype("BF16")
    return adapter.with_tensors(
        {name: value.astype(short).astype(np.float32) for name, value in adapter.tensors().items()}
    )
