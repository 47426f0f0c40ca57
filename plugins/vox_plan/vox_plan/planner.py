"""Plan what `vox train` would do under the same settings, without doing it.

The pipeline is train's own, up to its first write (`make_ready`, `with_advice`), so what is refused
here is what train refuses, in the same words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

from vox_core.api import plans
from vox_core.api.plans import Origin, Prepared, Progress, Ready, Tell, TrainSettings
from vox_core.errors import ConfigError
from vox_plan.advise import cached
from vox_plan.memory import WorstCase
from vox_plan.memory_forecast import (
    MemoryForecast,
    Option,
    alternatives,
    fitting,
    forecast,
    forecast_merge,
    suggest,
)
from vox_plan.report import (
    AdapterPlan,
    BackendPlan,
    DiskPlan,
    MemoryPlan,
    MergePlan,
    ModelPlan,
    PlanReport,
    StepPlan,
    Suggestion,
    Work,
)
from vox_plan.speed import Measured, measure, speed
from vox_plan.tuning_cache import Tuned

_OWN_KEYS = ("selection", "data", "valid", "audit")
"""Keys of `preflight.json` that have a field of their own in a plan."""


def plan(
    settings: TrainSettings,
    *,
    memory: Sequence[int] = (),
    to_be_run: bool = False,
    measured: bool = False,
    backend_origin: Origin | None = None,
    progress: Progress | None = None,
    tell: Tell = lambda _: None,
) -> PlanReport:
    """Plan what `vox_core.run.train.train` would do.

    Args:
        memory: sizes in bytes to suggest settings for, instead of the device that is here.
        to_be_run: with what `vox train --plan` holds a run against, for which the model is hashed.
        measured: take some steps of the run, to see how long it would take.
        backend_origin: where `settings.backend` was said, for the words of an error.
        progress: called with downloads and conversions.
        tell: receives each measurement.

    Raises:
        InputError: what train would refuse.
        StorageError: the results would not fit on the disk.
    """
    if measured and not settings.data and not settings.resume:
        raise _no_documents()
    fetching = plans.Fetching(progress)
    ready = plans.with_advice(
        plans.make_ready(
            settings, backend_origin, fetching, tell=tell, only_planned=True, hashed=to_be_run
        ),
        tell,
    )
    if measured and ready.advice.refusal:
        raise ready.advice.refusal
    took = measure(ready.prepared, tell) if measured else None
    return _report(ready, memory, fetching.happened, took, to_be_run)


def _report(
    ready: Ready, memory: Sequence[int], fetched: bool, took: Measured | None, to_be_run: bool
) -> PlanReport:
    prepared, made, model = ready.prepared, ready.prepared.plan, ready.prepared.model
    there, spec = bool(ready.settings.data), made.contract.adapter
    seen, grid, tuned = forecast(prepared), alternatives(prepared), cached(ready)
    steps = _steps(ready, seen.batch, there)
    exact = plans.exact(ready.settings, prepared) if there and to_be_run else None
    where, free = plans.space_free(ready.run.path)

    def rows(dataset: plans.Dataset, side: Literal["train", "valid"]) -> dict[str, Any]:
        return {**plans.account(dataset, prepared.left_out(side)), "longest": dataset.longest}

    return PlanReport(
        backend=BackendPlan(
            made.backend, made.backend_version, made.device, prepared.selection.why
        ),
        model=ModelPlan(
            model.id, model.path, model.revision, model.licence, model.model_type, fetched
        ),
        dtype=made.dtype,
        quant=made.contract.quant,
        data=rows(prepared.train, "train") if there else None,
        valid=rows(prepared.valid, "valid") if prepared.valid else None,
        assumed=None
        if there
        else {"documents": len(prepared.train.documents), "tokens": prepared.train.longest},
        steps=steps,
        adapter=AdapterPlan(spec.method, spec.rank, len(made.modules), made.trainable_parameters),
        speed=speed(prepared, steps, took, tuned, ready.run.path.parent),
        memory=MemoryPlan(
            seen.prediction.peak,
            asdict(seen.prediction),
            seen.total,
            seen.free,
            seen.fits,
            took.memory if took else None,
        ),
        options=tuple(grid),
        suggested=tuple(_suggestions(prepared, grid, seen, tuned, memory)),
        disk=DiskPlan(plans.space_needed(made, ready.settings), free, where),
        merge=_merge(ready),
        run=ready.run.path,
        writes=_writes(ready),
        warnings=tuple(_warnings(ready)),
        refused=_refused(ready),
        found={k: v for k, v in plans.preflight(prepared).items() if k not in _OWN_KEYS},
        settings=plans.in_force(ready.settings),
        exact=exact,
        digest=plans.digest_of(exact) if exact else None,
        versions=plans.versions(),
        audit={what: each.to_json() for what, each in prepared.audits.items()},
        chosen=tuple(prepared.rows.told()) if prepared.rows else (),
    )


def _warnings(ready: Ready) -> Iterator[str]:
    for notice in (*ready.prepared.notices(), *ready.advice.notices):
        if notice.level == "warning":
            yield notice.message


def _refused(ready: Ready) -> str | None:
    """Why `vox train` would refuse the run, on one line."""
    if (error := ready.advice.refusal) is None:
        return None
    return f"{error.what} ({error.code}): {error.found}, {error.expected}; {error.remedy}"


def _steps(ready: Ready, batch: WorstCase, there: bool) -> StepPlan:
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
        largest=batch._asdict(),
        work=_work(prepared) if there else None,
        validations=_validations(prepared, ready.settings.eval_every) if there else 0,
    )


def _work(prepared: Prepared) -> Work:
    """Added up over every step, as the run's telemetry will add it up."""
    contract, documents = prepared.plan.contract, prepared.train.documents
    rows, size, steps = len(documents), contract.batch_size, contract.total_steps
    lengths_D, trained_D = documents.lengths_D, documents.trained_D()
    taken = tokens = trained = 0
    for step in range(1, steps + 1):
        chosen = plans.documents_in_step(prepared.train, size, contract.seed, step)
        taken += len(chosen)
        tokens += int(lengths_D[chosen].sum())
        trained += int(trained_D[chosen].sum())
    return Work(plans.epochs_after(rows, size, steps), taken, tokens, trained)


def _validations(prepared: Prepared, every: int) -> int:
    """Before the first step, and as `--eval-every` says."""
    if prepared.valid is None:
        return 0
    total = prepared.plan.contract.total_steps
    return 1 + sum(plans.is_validated(step, total, every) for step in range(1, total + 1))


def _suggestions(
    prepared: Prepared,
    grid: Sequence[Option],
    seen: MemoryForecast,
    tuned: Tuned | None,
    memory: Sequence[int],
) -> Iterator[Suggestion]:
    """For each size; on this machine's device the fastest that was measured comes first: more
    tokens at once are no gain."""
    plan = prepared.plan
    made = Option(
        plan.contract.quant,
        plan.gradient_checkpointing,
        plan.micro_batch_tokens,
        seen.prediction.peak,
    )
    if not memory and tuned and seen.limit and fitting([made], seen.limit):
        yield Suggestion(seen.limit, made, measured=True)
        return
    for size in memory or [size for size in (seen.limit,) if size is not None]:
        asked = plan.contract.quant, plan.micro_batch_tokens
        yield Suggestion(size, suggest(grid, size, *asked))


def _merge(ready: Ready) -> MergePlan:
    """Of `vox merge RUN` without further flags."""
    prepared, plan = ready.prepared, ready.prepared.plan
    found = forecast_merge(prepared)
    total, free = _machine_memory(prepared)
    limit = total if free is None else free
    fits = None if limit is None else found.peak <= limit
    quant, model_type = plan.contract.quant, plan.contract.model.model_type
    trained = plans.as_trained(prepared.weights, quant, model_type, plan.dtype)
    where, room = plans.space_free(ready.run.path)
    return MergePlan(
        MemoryPlan(found.peak, asdict(found), total, free, fits),
        DiskPlan(plans.merge_space_needed(prepared.weights, trained), room, where),
    )


def _machine_memory(prepared: Prepared) -> tuple[int | None, int | None]:
    """All of the machine's memory and what is free: a merge works there, whatever device trains."""
    for device in prepared.selection.hardware.devices:
        if device.tag == "cpu":
            return device.memory_bytes, device.available_bytes
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    except (AttributeError, OSError, ValueError):
        return None, None


def _writes(ready: Ready) -> tuple[str, ...]:
    folder, source = plans.folder, ready.prepared.model.tokenizer
    tokenizer = [name for name in plans.TOKENIZER_FILES if (source / name).is_file()]
    rows = ready.prepared.rows
    skipped = (folder.SKIPPED,) if rows and any(rows.listed) else ()
    return (
        *(folder.PLAN, folder.PREFLIGHT, *skipped, folder.TELEMETRY),
        f"{folder.CHECKPOINTS}/step-N (the newest {ready.settings.keep})",
        *("adapter_model.safetensors", "adapter_config.json", folder.MANIFEST),
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
