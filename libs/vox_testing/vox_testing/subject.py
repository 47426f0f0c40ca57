"""The backend under test: its declarations, and its operations on tiny models.

A `Subject` calls through `vox_core.host`, as a run does, so a test sees what a user would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.api.host import (
    Backend,
    Found,
    Hardware,
    Manifest,
    ProbeFault,
    discover,
    probe_all,
)
from vox_core.contract import (
    AdapterState,
    Batch,
    DType,
    Event,
    ExecutionPlan,
    LoadedModel,
    LoadJob,
    MergeJob,
    MergeTarget,
    Step,
    StepDone,
    TrainJob,
    TrainResult,
    TrainState,
    World,
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


@dataclass(slots=True)
class Recorder:
    """A `RunContext` that records everything that a backend reports.

    Args:
        checkpoint_every: steps between checkpoints; 0 for none.
        stop_after: request a stop after this step; None for never.
    """

    seed: int
    scratch: Path
    checkpoint_every: int = 0
    stop_after: int | None = None
    world: World = field(default_factory=World)
    events: list[Event] = field(default_factory=list)
    checkpoints: list[TrainState] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def checkpoint_due(self, step: int) -> bool:
        return bool(self.checkpoint_every) and step % self.checkpoint_every == 0

    def checkpoint(self, state: TrainState) -> None:
        self.checkpoints.append(state)

    def stop_requested(self) -> bool:
        done = [event.step for event in self.events if isinstance(event, StepDone)]
        return self.stop_after is not None and bool(done) and done[-1] >= self.stop_after


@dataclass(frozen=True, slots=True)
class Run:
    """The result of training, and the recorded events and states."""

    result: TrainResult
    events: Sequence[Event]
    checkpoints: Sequence[TrainState]

    @property
    def state(self) -> TrainState:
        return self.result.state

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
            needs: `operation`, `method`, `dtype`, `quant`, `family` (a `model_type`),
                `streamed=True`.
        """
        has = self.manifest.capabilities
        for need, wanted in needs.items():
            if need == "operation":
                absent = [key for key in _NEEDED[wanted] if not getattr(has, key)]
                missing = f"any {', '.join(absent)}" if absent else ""
            elif need == "family":
                missing = "" if {"*", wanted} & {*has.families} else f"family {wanted}"
            elif need == "streamed":
                missing = "" if has.streamed_load else "streamed-load"
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
    scratch: Path

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

    def plan(self, model: Path | None = None, **options: Any) -> ExecutionPlan:
        """Make a plan for this backend in `dtype`; `options` are those of `jobs.plan`."""
        given = {
            "backend": self.backend.id,
            "device": self.declared.manifest.capabilities.devices[0],
            "dtype": self.dtype,
        }
        return jobs.plan(model or self.model, **{**given, **options})

    def start(self, plan: ExecutionPlan) -> TrainState:
        """Return the initial state of a run of `plan`."""
        return jobs.start(self.model, plan)

    def train(
        self,
        steps: Iterable[Step],
        plan: ExecutionPlan | None = None,
        start: TrainState | None = None,
        *,
        model: Path | None = None,
        validation: tuple[Batch, ...] = (),
        **context: Any,
    ) -> Run:
        """Train through `steps`; `context` goes to the `Recorder`."""
        plan = plan or self.plan()
        steps = list(steps)
        if start is None:
            start = self.start(plan)
        total = max(plan.contract.total_steps, steps[-1].number)
        plan = replace(plan, contract=replace(plan.contract, total_steps=total))
        recorder = Recorder(plan.contract.seed, self.scratch, **context)
        job = TrainJob(plan, model or self.model, iter(steps), start, validation)
        result = self.backend.train(job, recorder)
        return Run(result, recorder.events, recorder.checkpoints)

    def load(
        self,
        adapter: AdapterState | None = None,
        *,
        model: Path | None = None,
        dtype: DType | None = None,
        streamed: bool = False,
    ) -> LoadedModel:
        """Load a model, in `dtype` or in this subject's."""
        job = LoadJob(model or self.model, dtype or self.dtype, adapter, streamed=streamed)
        return self.backend.load(job, Recorder(0, self.scratch))

    def merge(
        self, adapter: AdapterState, targets: Iterable[MergeTarget], read: Any
    ) -> list[tuple[str, NDArray[Any]]]:
        """Merge `targets`, all of them into memory."""
        job = MergeJob(adapter, tuple(targets), read)
        return list(self.backend.merge(job, Recorder(0, self.scratch)).tensors)
