"""A backend with one thing broken, made out of a right one.

A mutant stands before the hooks of the CPU backend: it hands on another job, listens to another
context, or changes what comes back, and in everything else it is the backend that it wraps. Where
what is to be broken lies inside the engine, it replaces one name there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vox_core.contract import (
    LoadedModel,
    LoadJob,
    MergeJob,
    MergeResult,
    RunContext,
    TrainJob,
    TrainResult,
)
from vox_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from libs.vox_testing.tests.broken_results import Load, Merge
    from libs.vox_testing.tests.broken_training import Train


@dataclass(frozen=True)
class Mutant:
    """What is broken, and by which test it is caught.

    Args:
        train, merge, load: called with the right hook and its arguments.
        patch: name inside the engine, and what stands there instead.
        quantises: the right backend is `Quantising`, and declares every quantisation.
    """

    caught_by: str
    train: Callable[[Train, TrainJob, RunContext], TrainResult] | None = None
    merge: Callable[[Merge, MergeJob], MergeResult] | None = None
    load: Callable[[Load, LoadJob], LoadedModel] | None = None
    patch: tuple[str, object] | None = None
    quantises: bool = False


class Mutated:
    """The hooks of `backend`, those of the mutant before them."""

    def __init__(self, backend: Any, mutant: Mutant) -> None:
        self._backend, self._mutant = backend, mutant

    @hookimpl
    def vox_train(self, job: TrainJob, context: RunContext) -> TrainResult:
        right = self._backend.vox_train
        return (
            self._mutant.train(right, job, context) if self._mutant.train else right(job, context)
        )

    @hookimpl
    def vox_merge(self, job: MergeJob, context: RunContext) -> MergeResult:
        def right(job: MergeJob) -> MergeResult:
            return self._backend.vox_merge(job, context)

        return self._mutant.merge(right, job) if self._mutant.merge else right(job)

    @hookimpl
    def vox_load(self, job: LoadJob, context: RunContext) -> LoadedModel:
        def right(job: LoadJob) -> LoadedModel:
            return self._backend.vox_load(job, context)

        return self._mutant.load(right, job) if self._mutant.load else right(job)
