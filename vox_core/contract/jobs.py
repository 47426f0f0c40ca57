"""What a backend is given, what it gives back, and what it may ask of the core meanwhile.

Shape legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vox_core.contract.batch import Batch, Step
from vox_core.contract.events import Event
from vox_core.contract.sampling import Sampling
from vox_core.contract.spec import DType, ExecutionPlan, ModuleShape, Quant
from vox_core.contract.state import AdapterState, TrainState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.contract.arrays import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class TrainJob:
    """Train `start` along `steps`, which begin after `start.step`.

    `validation`, where there is any, is evaluated before the first step of a fresh run (as step 0)
    and after every step marked `evaluate`.
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
    """Write a plain Hugging Face folder in another format, and verify the result.

    Args:
        model: the folder; where `out` is None, the base of a model that will be written so.
        format: a name that the plugin provides at the extension point `model-formats`.
        out: an empty folder; None to check, before any work, whether the format has a place for the
            model's family, settings and shapes.
    """

    model: Path
    format: str
    out: Path | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MergeTarget:
    """One tensor of the base files that the adapter changes. `path` is a key of the adapter's
    `modules`, or the name of one of its `saved` tensors."""

    path: str
    shape: ModuleShape


@dataclass(frozen=True, slots=True, eq=False)
class MergeJob:
    """Compute the changed tensors, in the order of `targets`.

    `read(tensor)` gives a tensor of the base as the files have it (numpy; bfloat16 through
    `ml_dtypes`), memory-mapped, so that one tensor at a time is enough memory. `dtype` is what the
    results are rounded to; None keeps each tensor's own.
    """

    adapter: AdapterState
    targets: tuple[MergeTarget, ...]
    read: Callable[[str], NDArray[Any]]
    dtype: DType | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MergeResult:
    """Changed tensors, lazily, in the order of the job's targets: (tensor name, array of the job's
    dtype in the stored layout). The core writes them; nothing else does."""

    tensors: Iterator[tuple[str, NDArray[Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """Load a base model for generation or for logits, with an adapter or without.

    `streamed` asks for bounded memory: weights come from the files as layers need them.
    """

    model: Path
    dtype: DType
    adapter: AdapterState | None = None
    quant: Quant = "none"
    streamed: bool = False


class LoadedModel(Protocol):
    """A model that answers."""

    def generate(self, tokens_T: Ints, sampling: Sampling) -> Iterator[int]:
        """New token ids, each chosen by `next_token` and yielded at once. Whoever takes them ends
        the answer."""
        ...

    def logits(self, tokens_T: Ints) -> Floats:
        """float32 logits (T, V) of one document."""
        ...

    def close(self) -> None:
        """Give back memory and devices."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1


class RunContext(Protocol):
    """What the core offers a backend while it works."""

    @property
    def seed(self) -> int: ...

    @property
    def scratch(self) -> Path:
        """A folder for temporary files, removed afterwards."""
        ...

    @property
    def world(self) -> World: ...

    def emit(self, event: Event) -> None: ...

    def checkpoint_due(self, step: int) -> bool:
        """Ask after each step; on True build the state and call `checkpoint`."""
        ...

    def checkpoint(self, state: TrainState) -> None:
        """Keep `state`, if this work keeps any. An interrupt may call it without `checkpoint_due`,
        with the state after the last whole step."""
        ...

    def stop_requested(self) -> bool:
        """Ask after each step; on True finish with `stopped=True`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RowStream:
    """Rows that `vox_open_rows` opened, as JSON values. What is wrong with the source is raised
    while they are read, as `vox_core.api.rows.RowError`.

    Args:
        fingerprint: tells one state of a remote source from another; empty for a file, whose bytes
            do.
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
