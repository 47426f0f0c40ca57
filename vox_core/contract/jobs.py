"""Jobs that a backend receives, results that it returns, and the context it may call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vox_core.contract.batch import Batch
from vox_core.contract.events import Event, Notice
from vox_core.contract.spec import DType, ExecutionPlan, ModuleShape, Quant
from vox_core.contract.state import AdapterState
from vox_core.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class TrainJob:
    """Prepare to train adapters of a base model.

    Args:
        plan: the run's plan; its adapter's settings, dtype and dropout hold for every learner.
        model: folder of the base.
        document: the run's first step, shortened to one document (`probe_document`), for a backend
            that holds its own fast functions against a reference; None to go without that.
        shard: split the base among the ranks, with the capability `sharding`.
    """

    plan: ExecutionPlan
    model: Path
    document: Batch | None = None
    shard: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class WriteModelJob:
    """Write a Hugging Face folder in another format, and verify the result.

    Args:
        model: the folder; with `out` None, the base of the model to be written later.
        format: a name that the plugin provides at the extension point `model-formats`.
        out: an empty folder; None to check, before any work, whether the format supports the
            model's family, settings and shapes.
        adapter: an adapter of `model`, in PEFT's layout or mlx-lm's; then it alone is written.
        dtype: of the matrices; None keeps each tensor's own.
    """

    model: Path
    format: str
    out: Path | None = None
    adapter: Path | None = None
    dtype: DType | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MergeTarget:
    """A tensor of the base that the adapter changes; `path` is a key of the adapter's `modules` or
    the name of a `saved` tensor."""

    path: str
    shape: ModuleShape


@dataclass(frozen=True, slots=True, eq=False)
class MergeJob:
    """Compute the changed tensors, in the order of `targets`.

    `read(tensor)` returns a stored tensor of the base (numpy; bfloat16 through `ml_dtypes`),
    memory-mapped, so that memory for one tensor suffices. Results are rounded to `dtype`; None
    keeps each tensor's own.
    """

    adapter: AdapterState
    targets: tuple[MergeTarget, ...]
    read: Callable[[str], NDArray[Any]]
    dtype: DType | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MergeResult:
    """The changed tensors, lazily, in the order of the targets: (tensor name, array in the job's
    dtype and the stored layout); the core writes them."""

    tensors: Iterator[tuple[str, NDArray[Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """Load a base model, for generation, scores and logits; adapters are added to it.

    `streamed` bounds memory: each layer's weights are read when it runs.
    """

    model: Path
    dtype: DType
    quant: Quant = "none"
    streamed: bool = False


class Evaluator(ABC):
    """Evaluates a model while it is trained, on suites that were checked before."""

    @abstractmethod
    def evaluate(
        self, model: object, folder: Path, emit: Callable[[Event], None], stop: Callable[[], bool]
    ) -> Mapping[str, float] | None:
        """Evaluate a model into a folder, or complete the evaluation that is there.

        Args:
            model: a `vox_core.api.generating.OpenModel`, whose type this module cannot import. It
                computes with the trainer, and is closed afterwards.
            stop: whether to stop on the way, such as after Ctrl-C.

        Returns:
            Task -> score; None if stopped.
        """


@dataclass(frozen=True, slots=True)
class World:
    """Rank and size of the group of processes that train together. Rank 0 alone writes."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """Start the processes of a run, and wait for them.

    Args:
        arguments: of the `vox` command that each rank runs.
        processes: number of ranks.
        launcher: its name.
        resume: command that continues the run; its folder is RUN where it has no name yet.
    """

    arguments: tuple[str, ...]
    processes: int
    launcher: str
    resume: str = "vox train --resume RUN"


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """Exit code of a run whose ranks have all recorded their end."""

    exit_code: int


class RunContext(Protocol):
    """Services of the core for a working backend."""

    @property
    def world(self) -> World: ...

    def emit(self, event: Event) -> None:
        """Report a `Notice`, or `FastPaths`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RowStream:
    """Rows opened by `vox_open_rows`, as JSON values; faults of the source are raised while
    reading, as `vox_core.api.rows.RowError`.

    Args:
        fingerprint: identifies the version of a remote source; empty for a file, which is hashed.
    """

    rows: Iterable[Mapping[str, object]]
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check of `vox_doctor`."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """The result of `vox_advise`; it changes time and memory, never the trained numbers.

    Args:
        notices: shown, and kept in the run's telemetry.
        micro_batch_tokens: replaces the plan's value, unless the user set it or there is dropout,
            whose mask depends on the micro-batch.
        tuning: values for the backend's knobs, by name.
        refusal: why the run cannot succeed. It is raised by `vox train`, and shown by `vox plan`.
    """

    notices: tuple[Notice, ...] = ()
    micro_batch_tokens: int | None = None
    tuning: Mapping[str, str] = field(default_factory=dict)
    refusal: PlanError | None = None
