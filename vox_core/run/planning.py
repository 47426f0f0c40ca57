"""`vox plan`: what `vox train` would do under the same settings, without doing it.

The way is train's own, up to the first thing that it would write (`ready.py`), so what is refused
here is what would be refused there, in the same words. Memory is predicted (`vox_core.memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vox_core import models
from vox_core.config import TrainSettings
from vox_core.contract import DType, Method, Quant
from vox_core.data.dataset import Dataset
from vox_core.data.largest import Largest
from vox_core.digests import TOKENIZER_FILES
from vox_core.host import Origin
from vox_core.memory import Option, suggest
from vox_core.run import folder
from vox_core.run.foresight import Foresight, alternatives, foresee
from vox_core.run.prepare import Prepared, account, space_free, space_needed
from vox_core.run.ready import Ready, make_ready
from vox_core.run.tuning.search import Tell


@dataclass(frozen=True, slots=True)
class BackendPlan:
    """Who would train, on what, and why."""

    id: str
    version: str
    device: str
    why: str


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What would be trained; `fetched`: it was not on this machine, and now is."""

    id: str
    path: Path
    revision: str | None
    licence: str | None
    model_type: str
    fetched: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How the data would be gone through.

    Args:
        total: optimizer steps; None while there is no data that says it.
        tokens: of an average step.
        largest: the micro-batch that needs most memory.
    """

    total: int | None
    batch_size: int
    tokens: int
    micro_batch_tokens: int
    gradient_checkpointing: bool
    seq_len: int
    largest: dict[str, int]


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """What would be learnt."""

    method: Method
    rank: int
    modules: int
    trainable_parameters: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device; None where nobody knows."""

    peak: int
    parts: dict[str, int]
    total: int | None
    free: int | None
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to begin with in so many bytes; `option` is None if nothing fits."""

    memory: int
    option: Option | None


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """What steps like these were measured to take, here.

    Args:
        seconds: of all steps, without validation and checkpoints; None while there is no data.
        chosen: what was found to be fastest, in words.
        gain: how many times as fast as the defaults.
        refused: candidates that were thrown out, each with the reason.
        fast: modules in the backend's own functions, by kind, if the backend tells.
        own: modules that keep their library's way, by the reason.
        measured: when, in seconds since the epoch.
    """

    tokens_per_second: float
    seconds: float | None
    chosen: str
    gain: float
    refused: dict[str, str]
    fast: dict[str, int]
    own: dict[str, int]
    measured: float


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Bytes that the run folder may take, and where they would come from."""

    needed: int
    free: int
    where: Path


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A whole plan.

    Args:
        data, valid: what became of the rows, as in `preflight.json`, and the longest document;
            None without data.
        assumed: the documents that were planned with where there is no data.
        options: the same run under other settings, each with its peak.
        speed: None where nothing was measured.
        suggested: for the memory that is here, or for each that was asked about.
        writes: names in the run folder.
        warnings: what train would warn of in the data.
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
    run: Path
    writes: tuple[str, ...]
    warnings: tuple[str, ...]


def plan(
    settings: TrainSettings,
    *,
    memory: Sequence[int] = (),
    backend_origin: Origin | None = None,
    progress: models.Progress | None = None,
    tell: Tell = lambda _: None,
) -> PlanReport:
    """Plan what `vox_core.run.train.train` would do.

    Args:
        memory: sizes in bytes to suggest settings for, instead of the device that is here.
        backend_origin: where `settings.backend` was said, for the words of an error.
        progress: told of downloads and conversions.
        tell: told of each measurement where there are any.

    Raises:
        InputError: what train would refuse.
        StorageError: the results would not fit on the disk.
    """
    fetching = _Fetching(progress)
    ready = make_ready(settings, backend_origin, fetching, tell=tell, only_planned=True)
    return _report(ready, memory, fetching.happened)


class _Fetching:
    """Passes progress on, and remembers that there was some."""

    def __init__(self, progress: models.Progress | None) -> None:
        self._progress, self.happened = progress, False

    def __call__(self, what: str, done: int, total: int) -> None:
        self.happened = True
        if self._progress:
            self._progress(what, done, total)


def _report(ready: Ready, memory: Sequence[int], fetched: bool) -> PlanReport:
    prepared, made = ready.prepared, ready.prepared.plan
    there = bool(ready.settings.data)
    seen, grid = foresee(prepared), alternatives(prepared)
    steps = _steps(prepared, seen.largest, there)
    limits = memory or [size for size in (seen.limit,) if size is not None]
    model = prepared.model
    return PlanReport(
        backend=BackendPlan(
            made.backend, made.backend_version, made.device, prepared.selection.why
        ),
        model=ModelPlan(
            model.id, model.path, model.revision, model.licence, model.model_type, fetched
        ),
        dtype=made.dtype,
        quant=made.contract.quant,
        data=_data(prepared.train, prepared.left_out("train")) if there else None,
        valid=_data(prepared.valid, prepared.left_out("valid")) if prepared.valid else None,
        assumed=None if there else _assumed(prepared.train),
        steps=steps,
        adapter=_adapter(prepared),
        speed=_speed(prepared, steps),
        memory=_memory(seen),
        options=tuple(grid),
        suggested=tuple(
            Suggestion(size, suggest(grid, size, made.contract.quant)) for size in limits
        ),
        disk=_disk(ready),
        run=ready.run.path,
        writes=_writes(ready),
        warnings=tuple(n.message for n in prepared.notices() if n.level == "warning"),
    )


def _data(dataset: Dataset, left_out: dict[str, int]) -> dict[str, Any]:
    return {**account(dataset, left_out), "longest": dataset.longest}


def _assumed(dataset: Dataset) -> dict[str, int]:
    return {"documents": len(dataset.documents), "tokens": len(dataset.documents[0])}


def _steps(prepared: Prepared, largest: Largest, there: bool) -> StepPlan:
    made, contract = prepared.plan, prepared.plan.contract
    documents = len(prepared.train.documents)
    each_step = min(contract.batch_size, documents)
    return StepPlan(
        total=contract.total_steps if there else None,
        batch_size=contract.batch_size,
        tokens=round(prepared.train.tokens * each_step / documents),
        micro_batch_tokens=made.micro_batch_tokens,
        gradient_checkpointing=made.gradient_checkpointing,
        seq_len=contract.seq_len,
        largest=largest._asdict(),
    )


def _adapter(prepared: Prepared) -> AdapterPlan:
    made, spec = prepared.plan, prepared.plan.contract.adapter
    return AdapterPlan(spec.method, spec.rank, len(made.modules), made.trainable_parameters)


def _speed(prepared: Prepared, steps: StepPlan) -> SpeedPlan | None:
    answer = prepared.tuned
    if answer is None:
        return None
    rate = answer.tokens_per_second
    return SpeedPlan(
        tokens_per_second=rate,
        seconds=steps.total * steps.tokens / rate if steps.total else None,
        chosen=str(answer),
        gain=answer.gain,
        refused=answer.refused,
        fast=answer.fast,
        own=answer.own,
        measured=answer.measured,
    )


def _memory(seen: Foresight) -> MemoryPlan:
    prediction = seen.prediction
    return MemoryPlan(prediction.peak, asdict(prediction), seen.total, seen.free, seen.fits)


def _disk(ready: Ready) -> DiskPlan:
    where, free = space_free(ready.run.path)
    return DiskPlan(space_needed(ready.prepared.plan, ready.settings), free, where)


def _writes(ready: Ready) -> tuple[str, ...]:
    tokenizer = [name for name in TOKENIZER_FILES if (ready.prepared.model.path / name).is_file()]
    kept = f"{folder.CHECKPOINTS}/step-N (the newest {ready.settings.keep})"
    rows = ready.prepared.rows
    skipped = (folder.SKIPPED,) if rows and any(rows.listed) else ()
    adapter = ("adapter_model.safetensors", "adapter_config.json", folder.MANIFEST)
    return (
        *(folder.PLAN, folder.PREFLIGHT, *skipped, folder.TELEMETRY, kept),
        *adapter,
        *tokenizer,
        folder.CARD,
    )
