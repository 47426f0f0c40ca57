"""A backend with one thing broken, made out of a right one.

A mutant stands before the hooks of the CPU backend: it hands on another job, or changes methods of
the model that comes back, and in everything else it is the backend that it wraps. Where what is to
be broken lies inside the engine, it replaces one name there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vox_core.contract import (
    LoadJob,
    MergeJob,
    MergeResult,
    Model,
    RunContext,
    Trainer,
    TrainJob,
)
from vox_core.hookspecs import hookimpl

Train = Callable[[TrainJob], Trainer]
Merge = Callable[[MergeJob], MergeResult]
Load = Callable[[LoadJob], Model]


@dataclass(frozen=True)
class Mutant:
    """What is broken, and by which test it is caught.

    Args:
        train, merge, load: called with the right hook and its job.
        patch: name inside the engine, and what stands there instead.
        quantises: the right backend is `Quantising`, and declares every quantisation.
    """

    caught_by: str
    train: Callable[[Train, TrainJob], Trainer] | None = None
    merge: Callable[[Merge, MergeJob], MergeResult] | None = None
    load: Callable[[Load, LoadJob], Model] | None = None
    patch: tuple[str, object] | None = None
    quantises: bool = False


class Mutated:
    """The hooks of `backend`, those of the mutant before them."""

    def __init__(self, backend: Any, mutant: Mutant) -> None:
        self._backend, self._mutant = backend, mutant

    @hookimpl
    def vox_train(self, job: TrainJob, context: RunContext) -> Trainer:
        return self._call("train", job, context)  # type: ignore[no-any-return]

    @hookimpl
    def vox_merge(self, job: MergeJob, context: RunContext) -> MergeResult:
        return self._call("merge", job, context)  # type: ignore[no-any-return]

    @hookimpl
    def vox_load(self, job: LoadJob, context: RunContext) -> Model:
        return self._call("load", job, context)  # type: ignore[no-any-return]

    def _call(self, operation: str, job: Any, context: RunContext) -> Any:
        right, change = getattr(self._backend, f"vox_{operation}"), getattr(self._mutant, operation)
        if change is None:
            return right(job, context)
        return change(lambda other: right(other, context), job)


def _through(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if change := self._changes.get(name):
            return change(self._right, *args, **kwargs)
        return getattr(self._right, name)(*args, **kwargs)

    return method


_METHODS = sorted({*Trainer.__abstractmethods__, "logits_all", "peak_memory"})
_Through: Any = type("_Through", (Trainer,), {name: _through(name) for name in _METHODS})


class Changed(_Through):  # type: ignore[misc]
    """A model with some methods changed: each is called with the right model and its arguments."""

    def __init__(self, right: Any, **changes: Callable[..., Any]) -> None:
        self._right, self._changes = right, changes


def answering(**changes: Callable[..., Any]) -> Any:
    """Train or load with changed methods."""
    return lambda right, job: Changed(right(job), **changes)


def remembering(made: Callable[[], dict[str, Callable[..., Any]]]) -> Any:
    """The same, with methods made for each model, which may share what they remember."""
    return lambda right, job: Changed(right(job), **made())
