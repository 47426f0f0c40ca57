"""Jobs that a backend receives, results that it returns, and the context it may call.

Shape legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vox_core.contract.batch import Batch, Step
from vox_core.contract.events import Event, Notice
from vox_core.contract.sampling import Sampling
from vox_core.contract.spec import DType, ExecutionPlan, ModuleShape, Quant
from vox_core.contract.state import AdapterState, TrainState
from vox_core.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.contract.arrays import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class TrainJob:
    """Train `start` through `steps`, which begin after `start.step`.

    `validation`, if not empty, is evaluated before the first step of a fresh run (as step 0) and
    after every step marked `evaluate`.
    """

    plan: ExecutionPlan
    model: Path
    steps: Iterable[Step]
    start: TrainState
    validation: Sequence[Batch] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TrainResult:
    """The state after the last finished step; `stopped` if more steps were planned."""

    state: TrainState
    stopped: bool


@dataclass(frozen=True, slots=True, eq=False)
class WriteModelJob:
    """Write a Hugging Face folder in another format, and verify the result.

    Args:
        model: the folder; with `out` None, the base of the model to be written later.
        format: a name that the plugin provides at the extension point `model-formats`.
        out: an empty folder; None to check, before any work, whether the format supports the
            model's family, settings and shapes.
    """

    model: Path
    format: str
    out: Path | None = None


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
    """Load a base model, with or without an adapter, for generation or logits.

    `streamed` bounds memory: each layer's weights are read when it runs.
    """

    model: Path
    dtype: DType
    adapter: AdapterState | None = None
    quant: Quant = "none"
    streamed: bool = False


class LoadedModel(Protocol):
    """A loaded model that generates tokens and computes logits."""

    def generate(self, tokens_T: Ints, sampling: Sampling) -> Iterator[int]:
        """Yield new token ids as `next_token` chooses them; the caller ends the answer."""
        ...

    def logits(self, tokens_T: Ints) -> Floats:
        """Return float32 logits (T, V) of one document."""
        ...

    def close(self) -> None:
        """Free memory and devices."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """Rank and size of the group of processes that train together."""

    rank: int = 0
    size: int = 1


class RunContext(Protocol):
    """Services of the core for a working backend."""

    @property
    def seed(self) -> int: ...

    @property
    def scratch(self) -> Path:
        """A folder for temporary files, removed after the job."""
        ...

    @property
    def world(self) -> World: ...

    def emit(self, event: Event) -> None: ...

    def checkpoint_due(self, step: int) -> bool:
        """Whether to build the state and call `checkpoint` now; call it after each step."""
        ...

    def checkpoint(self, state: TrainState) -> None:
        """Save `state`, if this job keeps checkpoints. After an interrupt it may be called without
        `checkpoint_due`, with the state after the last complete step."""
        ...

    def stop_requested(self) -> bool:
        """Whether to finish now with `stopped=True`; call it after each step."""
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
    """One finding of `vox_doctor`."""

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
