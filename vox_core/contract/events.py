"""What happens in a run."""

from __future__ import annotations

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
class Validation(Event):
    """Weighted mean loss over the validation split."""

    name: ClassVar[str] = "validation"
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """A checkpoint is whole and on the disk."""

    name: ClassVar[str] = "checkpoint"
    step: int
    path: str
    seconds: float


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
