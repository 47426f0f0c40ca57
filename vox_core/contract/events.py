"""What happens in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from vox_core.contract.spec import DType, Quant


@dataclass(frozen=True, slots=True)
class Event:
    """What happened, for telemetry, progress and observers. Times are added by the core."""

    name: ClassVar[str] = "event"


@dataclass(frozen=True, slots=True)
class RunStart(Event):
    """A run begins, or goes on, with `first_step`; `rows` and `tokens` are those of one epoch, and
    `quant` is what the base is quantised to."""

    name: ClassVar[str] = "run_start"
    run: str
    model: str
    backend: str
    device: str
    dtype: DType
    contract: str
    first_step: int
    total_steps: int
    rows: int
    tokens: int
    trained_tokens: int
    quant: Quant = "none"


@dataclass(frozen=True, slots=True)
class FastPaths(Event):
    """How the model's modules compute: `fast` counts those in the backend's own functions, by kind;
    `own` those that keep their library's way, by the reason."""

    name: ClassVar[str] = "fast_paths"
    fast: Mapping[str, int]
    own: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """`loss` is the step's weighted mean; `grad_norm` is measured before clipping; `seconds` is the
    step's own wall time.

    `memory` is the most bytes that were in use so far on the device that trains; a backend whose
    device has no memory of its own leaves it out. The core fills it in then, with the most that was
    resident of the process, and `seconds_left`, and for a command's first step `startup_seconds`:
    how long it took from the start of the command to the end of that step."""

    name: ClassVar[str] = "step"
    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    seconds: float
    startup_seconds: float | None = None
    memory: int | None = None
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class StepSkipped(Event):
    """A step whose loss or gradient was NaN or infinite, and which was not applied: adapter,
    moments and the count of updates are as before it. What was not computed is None.

    The core keeps the batch for a person to look at, and ends the run by raising from `emit` once
    there have been too many in a row.
    """

    name: ClassVar[str] = "step_skipped"
    step: int
    loss: float | None
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Validation(Event):
    """Weighted mean loss over the validation split."""

    name: ClassVar[str] = "validation"
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """A checkpoint is whole, on the disk and read back. `seconds` is from the end of its step until
    then, of which training stood still for `held_seconds`."""

    name: ClassVar[str] = "checkpoint"
    step: int
    path: str
    seconds: float
    held_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A run is gone on with after `step`, from the checkpoint `path`; `skipped` are the newer ones
    that could not be used, each with the reason."""

    name: ClassVar[str] = "resume"
    step: int
    path: str
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "skipped", tuple(self.skipped))  # a list, where it came as JSON


@dataclass(frozen=True, slots=True)
class RunEnd(Event):
    """The run ended after `step`; `outcome` says how."""

    name: ClassVar[str] = "run_end"
    step: int
    outcome: Literal["done", "stopped", "failed"]
    seconds: float


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """A phase or a warning, in words."""

    name: ClassVar[str] = "notice"
    message: str
    level: Literal["info", "warning"] = "info"
