"""`vox plan`: what `vox train` would do under the same settings, without doing it.

The pipeline is train's own, up to its first write (`plan_run`, `with_advice`), so what is refused
here is what train refuses, in the same words.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vox_core.api import plans
from vox_core.api.files import free_space
from vox_core.api.models import TOKENIZER_FILES, Progress
from vox_core.api.plans import RunPlan, Tell, TrainSettings, folder
from vox_core.contract import SFT
from vox_core.errors import ConfigError, VoxError
from vox_plan.memory import WorstCase
from vox_plan.memory_forecast import (
    MemoryForecast,
    Option,
    alternatives,
    fitting,
    forecast,
    forecast_merge,
    samples_answers,
    step_tokens,
    suggest,
    wire_bytes,
)
from vox_plan.report import (
    AdapterPlan,
    BackendPlan,
    DiskPlan,
    MemoryPlan,
    MergePlan,
    ModelPlan,
    PlanReport,
    ProcessesPlan,
    StepPlan,
    Suggestion,
    Work,
)
from vox_plan.stopwatch import Measured, measure, speed
from vox_plan.tuning_cache import Tuned, cached

_OWN_KEYS = ("selection", "data", "valid", "audit")
"""Keys of `preflight.json` that have a field of their own in a plan."""


def plan(
    settings: TrainSettings,
    *,
    memory: Sequence[int] = (),
    to_be_run: bool = False,
    measured: bool = False,
    progress: Progress | None = None,
    tell: Tell = lambda _: None,
) -> PlanReport:
    """Plan what `vox_core.run.train.train` would do.

    Args:
        memory: sizes in bytes to suggest settings for, instead of the device that is here.
        to_be_run: with what `vox train --plan` holds a run against, for which the model is hashed.
        measured: take some steps of the run, to see how long it would take.
        progress: called with downloads and conversions.
        tell: receives each measurement.

    Raises:
        InputError: what train would refuse.
        StorageError: the results would not fit on the disk.
    """
    if measured and not settings.data and not settings.resume:
        raise _cannot_measure("no --data", "--data", "add --data, or leave out --measure")
    if measured and settings.objective != SFT.name:
        found = f"--objective {settings.objective}"
        raise _cannot_measure(found, "supervised training", "leave out --measure")
    if measured and settings.processes > 1:
        found = f"--processes {settings.processes}"
        raise _cannot_measure(found, "one process", "leave out one of the two")
    run = plans.with_advice(
        plans.plan_run(settings, progress, tell=tell, only_planned=True, hashed=to_be_run), tell
    )
    if measured and run.advice.refusal:
        raise run.advice.refusal
    took = measure(run, tell) if measured else None
    return _report(run, memory, took, to_be_run)


def _report(
    run: RunPlan, memory: Sequence[int], took: Measured | None, to_be_run: bool
) -> PlanReport:
    made, inputs = run.execution, run.inputs
    model = inputs.model
    there = bool(run.settings.data)
    seen, grid, tuned = forecast(run), alternatives(run), cached(run)
    steps = _steps(run, seen.batch, there)
    kept = plans.metadata(run, whole=True) if there and to_be_run else None
    train, adapter = run.data.train, run.contract.adapter
    where, free = free_space(run.run.path)
    return PlanReport(
        backend=BackendPlan(made.backend, made.backend_version, made.device, inputs.selection.why),
        model=ModelPlan(
            model.id, model.path, model.revision, model.licence, model.model_type, inputs.fetched
        ),
        dtype=made.dtype,
        quant=made.contract.quant,
        data=_data(train, run.left_out("train")) if there else None,
        valid=_data(run.data.valid, run.left_out("valid")) if run.data.valid else None,
        assumed=None if there else {"documents": len(train), "tokens": len(train[0])},
        steps=steps,
        adapter=AdapterPlan(
            adapter.method,
            adapter.rank,
            len(made.modules),
            tuple(sorted({path.rpartition(".")[2] for path in made.modules})),
            run.trained_elements,
        ),
        speed=speed(run, steps, took, tuned) if _has_speed(run) else None,
        memory=MemoryPlan(
            seen.prediction.peak,
            asdict(seen.prediction),
            seen.total,
            seen.free,
            seen.fits,
            took.memory if took else None,
        ),
        options=tuple(grid),
        suggested=tuple(_suggestions(run, grid, seen, tuned, memory)),
        disk=DiskPlan(plans.space_needed(run), free, where),
        merge=None if run.contract.adapter.method == "full" else _merge(run),
        objective=run.settings.objective,
        run=run.run.path,
        writes=_writes(run),
        warnings=tuple(_warnings(run)),
        refused=_refused(run.advice.refusal),
        found={k: v for k, v in run.preflight().items() if k not in _OWN_KEYS},
        settings=plans.in_force(run.settings),
        exact=kept,
        digest=plans.digest_of(kept) if kept else None,
        versions=plans.versions(run.inputs.backend),
        audit={what: each.to_json() for what, each in run.data.audits.items()},
        chosen=tuple(inputs.rows.report.told()),
        processes=_processes(run, seen.prediction.peak),
    )


def _has_speed(run: RunPlan) -> bool:
    """Whether vox predicts it: of supervised training in one process."""
    return run.inputs.objective is None and run.settings.processes == 1


def _warnings(run: RunPlan) -> Iterator[str]:
    for notice in (*run.notices(), *run.advice.notices):
        if notice.level == "warning":
            yield notice.message
    processes = run.settings.processes
    if processes > (batches := _micro_batches(run, run.execution.micro_batch_tokens)):
        yield (
            f"{batches} micro-batch{'' if batches == 1 else 'es'} in an average step for "
            f"{processes} processes: lower --micro-batch-tokens, for example to "
            f"{step_tokens(run) // processes:.0f}"
        )


def _micro_batches(run: RunPlan, tokens: int) -> int:
    """Micro-batches of an average step, of so many tokens each."""
    return math.ceil(step_tokens(run) / tokens)


def _processes(run: RunPlan, peak: int) -> ProcessesPlan | None:
    if (count := run.settings.processes) == 1:
        return None
    return ProcessesPlan(count, count * peak, wire_bytes(run))


def _refused(error: VoxError | None) -> str | None:
    """Why `vox train` would refuse the run, on one line."""
    if error is None:
        return None
    return f"{error.what} ({error.code}): {error.found}, {error.expected}; {error.remedy}"


def _data(dataset: plans.Dataset, left_out: Mapping[str, int]) -> dict[str, Any]:
    return {**plans.account(dataset, left_out), "longest": dataset.longest}


def _steps(run: RunPlan, batch: WorstCase, there: bool) -> StepPlan:
    made, contract = run.execution, run.contract
    rows = run.data.train.groups
    each_step = min(contract.batch_size, rows)
    answers = run.settings.rollouts if samples_answers(run) else None
    return StepPlan(
        total=contract.total_steps if there else None,
        batch_size=each_step,
        tokens=round(run.data.train.tokens * each_step / rows),
        micro_batch_tokens=made.micro_batch_tokens,
        gradient_checkpointing=made.gradient_checkpointing,
        seq_len=contract.seq_len,
        largest=batch._asdict(),
        work=_work(run) if there and not answers else None,
        answers=answers,
        validations=_validations(run) if there else 0,
    )


def _work(run: RunPlan) -> Work:
    """Added up over every step, as the run's telemetry will add it up."""
    contract, documents = run.contract, run.data.train
    rows, size, steps = documents.groups, contract.batch_size, contract.total_steps
    lengths_D, trained_D = documents.lengths_D, documents.trained_D()
    taken = tokens = trained = 0
    for step in range(1, steps + 1):
        chosen = plans.documents_in_step(documents, size, contract.seed, step)
        taken += len(chosen)
        tokens += int(lengths_D[chosen].sum())
        trained += int(trained_D[chosen].sum())
    epochs = plans.epochs_after(rows, size, steps) / run.settings.updates
    return Work(epochs, taken, tokens, trained)


def _validations(run: RunPlan) -> int:
    """Before the first step, and as `--eval-every` says."""
    if run.data.valid is None:
        return 0
    total, every = run.contract.total_steps, run.settings.eval_every
    return 1 + sum(plans.is_validated(step, total, every) for step in range(1, total + 1))


def _suggestions(
    run: RunPlan,
    grid: Sequence[Option],
    seen: MemoryForecast,
    tuned: Tuned | None,
    memory: Sequence[int],
) -> Iterator[Suggestion]:
    """For each size; on this machine's device the fastest that was measured comes first: more
    tokens at once are no gain. Settings that leave no process idle come before others."""
    plan = run.execution
    made = Option(
        plan.contract.quant,
        plan.gradient_checkpointing,
        plan.micro_batch_tokens,
        seen.prediction.peak,
    )
    if not memory and tuned and seen.limit and fitting([made], seen.limit):
        yield Suggestion(seen.limit, made, measured=True)
        return
    busy, processes = grid, run.settings.processes
    if processes > 1:
        busy = [
            option
            for option in (made, *grid)
            if _micro_batches(run, option.micro_batch_tokens) >= processes
        ]
    for size in memory or [size for size in (seen.limit,) if size is not None]:
        asked = plan.contract.quant, plan.micro_batch_tokens
        yield Suggestion(size, suggest(busy, size, *asked) or suggest(grid, size, *asked))


def _merge(run: RunPlan) -> MergePlan:
    """Of `vox merge RUN` without further flags."""
    plan = run.execution
    parts = forecast_merge(run)
    peak = sum(parts.values())
    total, free = _machine_memory(run)
    limit = total if free is None else free
    fits = None if limit is None else peak <= limit
    quant, model_type = plan.contract.quant, plan.contract.model.model_type
    trained = plans.as_trained(run.inputs.weights, quant, model_type, plan.dtype)
    where, room = free_space(run.run.path)
    return MergePlan(
        MemoryPlan(peak, parts, total, free, fits),
        DiskPlan(plans.merge_space_needed(run.inputs.weights, trained), room, where),
    )


def _machine_memory(run: RunPlan) -> tuple[int | None, int | None]:
    """Return the machine's total and free memory, in bytes, in which a merge works."""
    for device in run.inputs.selection.hardware.devices:
        if device.tag == "cpu":
            return device.memory_bytes, device.available_bytes
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    except (AttributeError, OSError, ValueError):
        return None, None


def _writes(run: RunPlan) -> tuple[str, ...]:
    source = run.inputs.model.tokenizer
    tokenizer = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    result = ["adapter_model.safetensors", "adapter_config.json", folder.PROBE, *tokenizer]
    if run.contract.adapter.method == "full":
        result = [f"{folder.MODEL}/ (a plain checkpoint)"]
    skipped = (folder.SKIPPED,) if run.inputs.rows.report.listed else ()
    sampled = (folder.ROLLOUTS,) if run.contract.rollouts.answers else ()
    return (
        *(folder.PLAN, folder.PREFLIGHT, *skipped, folder.TELEMETRY, folder.RECORD, *sampled),
        f"{folder.CHECKPOINTS}/step-N (the newest {run.settings.keep})",
        *result,
        folder.MANIFEST,
        folder.CARD,
    )


def _cannot_measure(found: str, expected: str, remedy: str) -> ConfigError:
    return ConfigError(
        "C004",
        "how long a run takes is measured on its documents, in supervised training, by one process",
        where="--measure",
        found=found,
        expected=expected,
        remedy=remedy,
    )
