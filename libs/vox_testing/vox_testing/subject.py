"""The backend under test: its declarations, and its operations on tiny models.

A `Subject` calls through `vox_core.host`, and `Subject.train` takes steps with the core's own
`Learner`, as a run does, so a test sees what a user would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest

from vox_core.api.host import Backend, Found, Hardware, Manifest, ProbeFault, discover, probe_all
from vox_core.api.training import Learner
from vox_core.contract import (
    AdapterState,
    Batch,
    DType,
    Event,
    ExecutionPlan,
    LoadJob,
    MergeJob,
    MergeTarget,
    Method,
    Model,
    Step,
    StepDone,
    StepSkipped,
    Trainer,
    TrainJob,
    TrainState,
    Update,
    World,
    probe_document,
)
from vox_core.errors import BackendError
from vox_testing import jobs
from vox_testing.tolerance import Tolerance, tolerance

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Capabilities that an operation requires: a manifest that lists none of one declares that the
# backend does not have the operation (yet).
_NEEDED = {
    "train": ("methods", "dtypes", "quantisations", "families"),
    "merge": ("methods",),
    "load": ("dtypes", "families"),
}
NAME = "adapter"
"""The name of a trainer's learner, as `vox train` has it."""
LONGEST_FIRST: tuple[DType, ...] = ("fp32", "fp16", "bf16")
"""By significant bits: 24, 11 and 8."""
_LISTED_IN = {
    "method": "methods",
    "dtype": "dtypes",
    "quant": "quantisations",
    "optimizer": "optimizers",
}


def find(backend_id: str) -> Found:
    """Return the installed plugin of an id.

    Raises:
        BackendError: B003, there is none.
    """
    plugins = discover()
    for plugin in plugins:
        if plugin.id == backend_id:
            return plugin
    raise BackendError(
        "B003",
        f"backend {backend_id!r} is not installed",
        found=f"installed: {', '.join(plugin.id for plugin in plugins) or 'none'}",
        remedy="install the package whose entry point has this name: pip install -e .",
    )


def learn(trainer: Trainer, batch: Batch, update: Update, seed: int = 0) -> float:
    """Let the learner `NAME` take a step on one batch; return the gradient's norm."""
    trainer.accumulate(batch, seed, NAME)
    return trainer.update(update, NAME)


@dataclass(slots=True)
class Recorder:
    """A `RunContext` that records the notices of a backend."""

    world: World = field(default_factory=World)
    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)


@dataclass(frozen=True, slots=True)
class Run:
    """Result of training: an event per step, and the states before the first and after each."""

    events: Sequence[StepDone | StepSkipped]
    states: Sequence[TrainState]

    @property
    def state(self) -> TrainState:
        return self.states[-1]

    @property
    def steps(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]

    @property
    def losses(self) -> list[float]:
        return [event.loss for event in self.steps]


@dataclass(frozen=True, slots=True)
class Declared:
    """A plugin's manifest, and its probe's result on this machine."""

    found: Found
    hardware: Hardware | ProbeFault

    @classmethod
    def of(cls, backend_id: str) -> Declared:
        """Read the manifest and run the probe, without importing the plugin.

        Raises:
            BackendError: there is no such plugin, or its manifest is invalid.
        """
        found = find(backend_id)
        if found.fault:
            raise found.fault
        return cls(found, probe_all([found])[found.id])

    @property
    def manifest(self) -> Manifest:
        assert self.found.manifest is not None, self.found.id
        return self.found.manifest

    def lacks(self, **needs: Any) -> str | None:
        """Return why a test with these `needs` does not apply to this backend; None if it does.

        Args:
            needs: `operation`, `method`, `dtype`, `quant`, `family` (a `model_type`); or True
                for `streamed_load`, `learners`, `one_pass`, `several_targets`.
        """
        has = self.manifest.capabilities
        for need, wanted in needs.items():
            if need == "operation":
                absent = [key for key in _NEEDED[wanted] if not getattr(has, key)]
                missing = f"any {', '.join(absent)}" if absent else ""
            elif need == "family":
                missing = "" if {"*", wanted} & {*has.families} else f"family {wanted}"
            elif wanted is True:
                missing = "" if getattr(has, need) else need.replace("_", "-")
            else:
                missing = "" if wanted in getattr(has, _LISTED_IN[need]) else f"{need} {wanted}"
            if missing:
                return f"not declared: {missing}"
        if getattr(self.hardware, "present", True):
            return None
        return f"no such hardware here: {getattr(self.hardware, 'detail', '')}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded backend and a model folder to run it on."""

    declared: Declared
    backend: Backend
    model: Path

    @property
    def on_cpu(self) -> bool:
        """Whether sums have a fixed order, so that the same work gives the same bits."""
        return self.declared.manifest.capabilities.devices == ("cpu",)

    @property
    def dtype(self) -> DType:
        """The widest declared dtype, for comparisons with float64."""
        has = self.declared.manifest.capabilities.dtypes
        return next(dtype for dtype in LONGEST_FIRST if dtype in has)

    @property
    def tolerance(self) -> Tolerance:
        """The tolerances of `dtype`."""
        return tolerance(self.dtype, on_cpu=self.on_cpu)

    @property
    def adapter_methods(self) -> Sequence[Method]:
        """The declared methods other than `full`, LoRA first; without one the test is skipped."""
        declared = {*self.declared.manifest.capabilities.methods} - {"full"}
        found = [each for each in get_args(Method) if each in declared]
        return found or pytest.skip("not declared: any method of an adapter")

    def plan(self, model: Path | None = None, **options: Any) -> ExecutionPlan:
        """Make a plan for this backend in `dtype`, with its first adapter method.

        Args:
            options: those of `jobs.plan`.
        """
        options["method"] = options.get("method") or self.adapter_methods[0]
        given = {
            "backend": self.backend.id,
            "device": self.declared.manifest.capabilities.devices[0],
            "dtype": self.dtype,
        }
        return jobs.plan(model or self.model, **{**given, **options})

    def start(self, plan: ExecutionPlan) -> TrainState:
        """Return the initial state of a run of `plan`."""
        return jobs.start(self.model, plan)

    @contextmanager
    def trainer(
        self,
        plan: ExecutionPlan | None = None,
        steps: Sequence[Step] = (),
        model: Path | None = None,
    ) -> Iterator[Trainer]:
        """Open a trainer without a learner, for this subject's model or another."""
        document = probe_document(steps[0].batches) if steps else None
        job = TrainJob(plan or self.plan(), model or self.model, document)
        trainer = self.backend.train(job, Recorder())
        try:
            yield trainer
        finally:
            trainer.close()

    @contextmanager
    def learning(
        self, plan: ExecutionPlan | None = None, start: TrainState | None = None
    ) -> Iterator[Trainer]:
        """Open a trainer with the learner `NAME`."""
        plan = plan or self.plan()
        with self.trainer(plan) as trainer:
            trainer.add_learner(NAME, self.start(plan) if start is None else start)
            yield trainer

    def train(
        self,
        steps: Iterable[Step],
        plan: ExecutionPlan | None = None,
        start: TrainState | None = None,
        model: Path | None = None,
    ) -> Run:
        """Take `steps` as `vox train` does."""
        plan, steps = plan or self.plan(), list(steps)
        start = self.start(plan) if start is None else start
        spec, seed = plan.contract.optimizer, plan.contract.seed
        with self.trainer(plan, steps, model) as trainer:
            learner = Learner(trainer, start, spec, seed)
            views = plan.contract.adapter.method == "full"
            states, events = [learner.state().copy() if views else learner.state()], []
            for step in steps:
                events.append(learner.take(step))
                states.append(learner.state().copy() if views else learner.state())
        return Run(events, states)

    @contextmanager
    def loaded(
        self,
        *adapters: AdapterState,
        model: Path | None = None,
        dtype: DType | None = None,
        streamed: bool = False,
    ) -> Iterator[Model]:
        """Load a model, in `dtype` or in this subject's, with adapters named `a`, `b`, ..."""
        job = LoadJob(model or self.model, dtype or self.dtype, streamed=streamed)
        made = self.backend.load(job, Recorder())
        try:
            for name, adapter in zip("abcdefgh", adapters, strict=False):
                made.add_adapter(name, adapter)
            yield made
        finally:
            made.close()

    def merge(
        self,
        adapter: AdapterState,
        targets: Iterable[MergeTarget],
        read: Any,
        dtype: DType | None = None,
    ) -> list[tuple[str, NDArray[Any]]]:
        """Merge `targets`, all of them into memory."""
        job = MergeJob(adapter, tuple(targets), read, dtype)
        return list(self.backend.merge(job, Recorder()).tensors)
