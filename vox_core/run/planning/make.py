"""`vox plan`: what `vox train` would do under the same settings, without doing it.

The way is train's own, up to the first thing that it would write (`ready.py`), so what is refused
here is what would be refused there, in the same words. Memory is predicted (`vox_core.memory`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vox_core import models
from vox_core.config import TrainSettings
from vox_core.data.dataset import Dataset
from vox_core.data.largest import Largest
from vox_core.digests import TOKENIZER_FILES
from vox_core.errors import ConfigError
from vox_core.host import Origin
from vox_core.memory import Option, suggest
from vox_core.memory.fit import fitting
from vox_core.run import folder, foresight
from vox_core.run.artifacts import versions
from vox_core.run.foresight import Foresight, alternatives, foresee
from vox_core.run.planned import digest_of, exact, in_force
from vox_core.run.planning.merging import merge_plan
from vox_core.run.planning.report import (
    AdapterPlan,
    BackendPlan,
    DiskPlan,
    MemoryPlan,
    ModelPlan,
    PlanReport,
    StepPlan,
    Suggestion,
)
from vox_core.run.planning.speed import Measured, measure, speed
from vox_core.run.planning.work import validations_of, work_of
from vox_core.run.prepare import Prepared, account, preflight, space_free, space_needed
from vox_core.run.ready import Ready, make_ready
from vox_core.run.sources import Fetching
from vox_core.run.tuning.search import Tell

_TOLD_APART = ("selection", "data", "valid", "audit")
"""What of `preflight.json` has a place of its own in a plan."""


def plan(
    settings: TrainSettings,
    *,
    memory: Sequence[int] = (),
    to_be_run: bool = False,
    measured: bool = False,
    backend_origin: Origin | None = None,
    progress: models.Progress | None = None,
    tell: Tell = lambda _: None,
) -> PlanReport:
    """Plan what `vox_core.run.train.train` would do.

    Args:
        memory: sizes in bytes to suggest settings for, instead of the device that is here.
        to_be_run: with what `vox train --plan` holds a run against, for which the model is hashed.
        measured: take some steps of the run, to see how long it would take.
        backend_origin: where `settings.backend` was said, for the words of an error.
        progress: told of downloads and conversions.
        tell: told of each measurement where there are any.

    Raises:
        InputError: what train would refuse.
        StorageError: the results would not fit on the disk.
    """
    if measured and not settings.data and not settings.resume:
        raise _no_documents()
    fetching = Fetching(progress)
    ready = make_ready(
        settings, backend_origin, fetching, tell=tell, only_planned=True, hashed=to_be_run
    )
    if measured:
        allowed = ready.settings.allow_overcommit
        foresight.require_memory(ready.prepared, allowed=allowed, resumed=not ready.fresh)
    took = measure(ready.prepared, tell) if measured else None
    return _report(ready, memory, fetching.happened, took, to_be_run)


def _report(
    ready: Ready, memory: Sequence[int], fetched: bool, took: Measured | None, to_be_run: bool
) -> PlanReport:
    prepared, made = ready.prepared, ready.prepared.plan
    there = bool(ready.settings.data)
    seen, grid = foresee(prepared), alternatives(prepared)
    steps = _steps(ready, seen.largest, there)
    model = prepared.model
    kept = exact(ready.settings, prepared) if there and to_be_run else None
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
        speed=speed(prepared, steps.work, steps.validations, took, ready.run.path.parent),
        memory=_memory(seen, took),
        options=tuple(grid),
        suggested=tuple(_suggestions(prepared, grid, seen, memory)),
        disk=_disk(ready),
        merge=merge_plan(ready),
        run=ready.run.path,
        writes=_writes(ready),
        warnings=tuple(_warnings(ready, seen)),
        found={k: v for k, v in preflight(prepared).items() if k not in _TOLD_APART},
        settings=in_force(ready.settings),
        exact=kept,
        digest=digest_of(kept) if kept else None,
        versions=versions(),
        audit={what: each.to_json() for what, each in prepared.audits.items()},
        chosen=tuple(prepared.rows.told()) if prepared.rows else (),
    )


def _warnings(ready: Ready, seen: Foresight) -> Iterator[str]:
    yield from (n.message for n in ready.prepared.notices() if n.level == "warning")
    if seen.hopeless and not ready.settings.allow_overcommit:
        yield "vox train refuses this run: it needs more memory than the device has (VOX-P004)"


def _data(dataset: Dataset, left_out: Mapping[str, int]) -> dict[str, Any]:
    return {**account(dataset, left_out), "longest": dataset.longest}


def _assumed(dataset: Dataset) -> dict[str, int]:
    return {"documents": len(dataset.documents), "tokens": len(dataset.documents[0])}


def _steps(ready: Ready, largest: Largest, there: bool) -> StepPlan:
    prepared = ready.prepared
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
        work=work_of(prepared) if there else None,
        validations=validations_of(prepared, ready.settings.eval_every) if there else 0,
    )


def _adapter(prepared: Prepared) -> AdapterPlan:
    made, spec = prepared.plan, prepared.plan.contract.adapter
    return AdapterPlan(spec.method, spec.rank, len(made.modules), made.trainable_parameters)


def _suggestions(
    prepared: Prepared, grid: Sequence[Option], seen: Foresight, memory: Sequence[int]
) -> Iterator[Suggestion]:
    """For each size; on the device that is here, what was measured to be the fastest comes first:
    more tokens at once than those are no gain."""
    plan = prepared.plan
    made = Option(
        plan.contract.quant,
        plan.gradient_checkpointing,
        plan.micro_batch_tokens,
        seen.prediction.peak,
    )
    if not memory and prepared.tuned and seen.limit and fitting([made], seen.limit):
        yield Suggestion(seen.limit, made, measured=True)
        return
    for size in memory or [size for size in (seen.limit,) if size is not None]:
        asked = plan.contract.quant, plan.micro_batch_tokens
        yield Suggestion(size, suggest(grid, size, *asked))


def _memory(seen: Foresight, took: Measured | None) -> MemoryPlan:
    prediction = seen.prediction
    measured = took.memory if took else None
    return MemoryPlan(
        prediction.peak, asdict(prediction), seen.total, seen.free, seen.fits, measured
    )


def _disk(ready: Ready) -> DiskPlan:
    where, free = space_free(ready.run.path)
    return DiskPlan(space_needed(ready.prepared.plan, ready.settings), free, where)


def _writes(ready: Ready) -> tuple[str, ...]:
    source = ready.prepared.model.tokenizer
    tokenizer = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    kept = f"{folder.CHECKPOINTS}/step-N (the newest {ready.settings.keep})"
    adapter = ("adapter_model.safetensors", "adapter_config.json", folder.MANIFEST)
    rows = ready.prepared.rows
    skipped = (folder.SKIPPED,) if rows and any(rows.listed) else ()
    return (
        *(folder.PLAN, folder.PREFLIGHT, *skipped, folder.TELEMETRY, kept),
        *adapter,
        *tokenizer,
        folder.CARD,
    )


def _no_documents() -> ConfigError:
    return ConfigError(
        "C004",
        "how long a run takes is measured on its own documents",
        where="--measure",
        found="no --data",
        expected="--data",
        remedy="add --data, or leave out --measure",
    )
