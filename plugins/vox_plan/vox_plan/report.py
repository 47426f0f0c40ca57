"""A plan as `vox plan` prints it: the fields of its JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vox_core.api.plans import PLAN_FORMAT
from vox_core.contract import DType, Method, Quant
from vox_plan.memory_forecast import Option


@dataclass(frozen=True, slots=True)
class BackendPlan:
    """The selected backend, its device, and why it was selected."""

    id: str
    version: str
    device: str
    why: str


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The base model; `fetched`: downloaded just now."""

    id: str
    path: Path
    revision: str | None
    licence: str | None
    model_type: str
    fetched: bool


@dataclass(frozen=True, slots=True)
class Work:
    """Totals over all steps of the run, every epoch counted, as its telemetry will add them up.

    Args:
        documents: each as often as it is seen.
        trained_tokens: those whose loss is computed.
    """

    epochs: float
    documents: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Steps and micro-batches.

    Args:
        total: optimizer steps; None without data.
        batch_size: examples of a step.
        tokens: of an average step.
        largest: the micro-batch that needs most memory.
        work: of all steps; None without data, or if the model answers.
        answers: to each prompt, if the model answers.
        validations: passes over the validation data, the one before the first step included.
    """

    total: int | None
    batch_size: int
    tokens: int
    micro_batch_tokens: int
    gradient_checkpointing: bool
    seq_len: int
    largest: dict[str, int]
    work: Work | None = None
    answers: int | None = None
    validations: int = 0


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The adapter to train.

    Args:
        targets: last components of the paths of its modules, sorted.
    """

    method: Method
    rank: int
    modules: int
    targets: tuple[str, ...]
    trainable_parameters: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device; None if unknown.

    Args:
        measured: the peak during measured steps, the planning itself included.
    """

    peak: int
    parts: dict[str, int]
    total: int | None
    free: int | None
    fits: bool | None
    measured: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessesPlan:
    """Processes that share each step.

    Args:
        count: of them.
        memory: bytes of all of them.
        wire: bytes that each sends in a step, on average.
    """

    count: int
    memory: int
    wire: int


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Needs of `vox merge`: the machine's memory, and disk space.

    Args:
        disk: bytes of the merged model, and of temporary files beside it.
    """

    memory: MemoryPlan
    disk: DiskPlan


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Settings to begin with in so many bytes; `option` is None if nothing fits.

    Args:
        measured: by `--tune refresh`, to be the fastest here.
    """

    memory: int
    option: Option | None
    measured: bool = False


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """Speed of such steps on this machine.

    Args:
        how: `measured`: steps of this very run, now; `tuned`: what `--tune refresh` has kept;
            `earlier`: the steps of `run`.
        seconds: of all steps, without validation and checkpoints; None without data.
        loading: seconds before the first step; None if not measured.
        validating: seconds of all validations; None if not measured.
        chosen: the tuned settings, in words; empty where nothing was tuned.
        gain: speed-up over the defaults.
        refused: candidates that were thrown out, each with the reason.
        fast: modules in the backend's own functions, by kind, if the backend reports them.
        own: modules that keep their library's forward, by the reason.
        measured: when, in seconds since the epoch.
        steps: how many were measured; 0 where `tuned`.
        run: one of the same model, backend, device and precision, where `earlier`.
    """

    tokens_per_second: float
    seconds: float | None = None
    chosen: str = ""
    gain: float = 1.0
    refused: dict[str, str] = field(default_factory=dict)
    fast: dict[str, int] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)
    measured: float = 0.0
    how: Literal["measured", "tuned", "earlier"] = "tuned"
    steps: int = 0
    run: str | None = None
    loading: float | None = None
    validating: float | None = None

    @property
    def whole(self) -> float | None:
        """Seconds of the run; the parts that have an estimate."""
        if self.seconds is None:
            return None
        return self.seconds + (self.loading or 0.0) + (self.validating or 0.0)


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Bytes that a folder may take, and where they would come from."""

    needed: int
    free: int
    where: Path


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A whole plan.

    Args:
        data, valid: what became of the rows, as in `preflight.json`, and the longest document;
            None without data.
        found: what else `preflight.json` would say of the data.
        chosen: which rows are left out and why, in words; nothing where every row is used.
        audit: the audit of the masks, as in `preflight.json`.
        assumed: the documents assumed in place of data.
        options: the same run under other settings, each with its peak.
        speed: None without a measurement or an earlier run.
        suggested: for this machine's memory, or for each `--memory`.
        writes: names in the run folder.
        warnings: what train would warn of, the audit of the masks included; the audit's errors
            refuse a plan as they refuse a run.
        processes: None for a run of one. `memory` is that of each, of its share of the device.
        refused: why train would refuse the run, as more memory is needed than there is.
        settings: every one in force.
        exact: what `vox train --plan` holds the run against; None where no run can be made of
            the plan, as nothing was hashed or there is no data.
        digest: of `exact`.
        versions: of what can change a result.
    """

    backend: BackendPlan
    model: ModelPlan
    dtype: DType
    quant: Quant
    data: dict[str, Any] | None
    valid: dict[str, Any] | None
    assumed: dict[str, int] | None
    steps: StepPlan
    adapter: AdapterPlan
    speed: SpeedPlan | None
    memory: MemoryPlan
    options: tuple[Option, ...]
    suggested: tuple[Suggestion, ...]
    disk: DiskPlan
    merge: MergePlan | None
    objective: str
    run: Path
    writes: tuple[str, ...]
    warnings: tuple[str, ...]
    found: dict[str, Any]
    settings: dict[str, Any]
    exact: dict[str, Any] | None = None
    digest: str | None = None
    versions: dict[str, str] | None = None
    audit: dict[str, Any] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    refused: str | None = None
    processes: ProcessesPlan | None = None
    format: str = PLAN_FORMAT
