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
    step's own wall time. `startup_seconds`, which the core fills in for a command's first step, is
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
