"""Events of a run, for telemetry, progress and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from vox_core.contract.spec import DType, Quant

Outcome: TypeAlias = Literal["done", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of events; the core adds the time."""

    name: ClassVar[str] = "event"


@dataclass(frozen=True, slots=True)
class RunStart(Event):
    """A run starts or resumes at `first_step`; `rows` and `tokens` are per epoch; `quant` is the
    base's quantisation."""

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
    """Counts of model modules by implementation: `fast` in the backend's own functions, by kind;
    `own` in the library's, by reason."""

    name: ClassVar[str] = "fast_paths"
    fast: Mapping[str, int]
    own: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """A finished step: `loss` is its weighted mean, `grad_norm` is before clipping, `seconds` is
    its wall time.

    `memory` is the peak number of bytes in use on the training device; a backend whose device has
    no memory of its own leaves it out, and the core sets it to the process's peak resident size.
    The core also sets `seconds_left`, and on a command's first step `startup_seconds`: the time
    from the start of planning to the end of that step."""

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
class ObjectiveMetrics(Event):
    """Metrics of the objective in a step, as means over its groups."""

    name: ClassVar[str] = "objective"
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepSkipped(Event):
    """A step with a NaN or infinite loss or gradient, which changed neither adapter, optimizer
    state nor update count; values that were not computed are None.

    The core saves the batch for inspection. After too many consecutive ones it ends the run by
    raising from `emit`.
    """

    name: ClassVar[str] = "step_skipped"
    step: int
    loss: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Validation(Event):
    """Weighted mean loss over the validation split.

    Args:
        reward: mean reward of the answers to the validation prompts, for an objective with rewards.
        reward_margin: half the width of its 95 % interval over the prompts, by the normal
            approximation; None with fewer than two prompts.
    """

    name: ClassVar[str] = "validation"
    step: int
    loss: float
    reward: float | None = None
    reward_margin: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation(Event):
    """The model after `step` was evaluated: scores by name, `eval/TASK`, and the scorecard's
    folder."""

    name: ClassVar[str] = "evaluation"
    step: int
    scores: Mapping[str, float]
    path: str


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """A checkpoint was written and read back. `seconds` counts from the end of its step; training
    was blocked for `held_seconds` of them."""

    name: ClassVar[str] = "checkpoint"
    step: int
    path: str
    seconds: float
    held_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A run resumes after `step` from the checkpoint `path`; `skipped` lists newer unusable ones,
    each with the reason."""

    name: ClassVar[str] = "resume"
    step: int
    path: str
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunEnd(Event):
    """The run ended after `step`; `outcome` says how, and `error` why it failed."""

    name: ClassVar[str] = "run_end"
    step: int
    outcome: Outcome
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """An informational message or a warning."""

    name: ClassVar[str] = "notice"
    message: str
    level: Literal["info", "warning"] = "info"
