"""The plugin's hooks. `vox_advise`: knobs that were measured to be fastest, and whether memory
suffices.

`--tune refresh` measures here, before the run's first write, and keeps the result in the cache;
`--tune use` takes what the cache has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vox_core.api.models import Progress
from vox_core.api.plans import RunPlan, Tell, TrainSettings
from vox_core.contract import Advice, LaunchJob, LaunchResult, Notice
from vox_core.errors import ConfigError, PlanError
from vox_core.hookspecs import hookimpl
from vox_plan import planner, tuning_cache
from vox_plan.jobs import write_job
from vox_plan.launch import launch
from vox_plan.memory_forecast import MemoryForecast, forecast, refusal, shortage
from vox_plan.report import PlanReport
from vox_plan.tuning import search
from vox_plan.tuning_cache import Tuned, cached, tunable


@hookimpl
def vox_advise(plan: RunPlan, tell: Tell) -> Advice:
    """Measure if the user wants it, then forecast memory.

    Raises:
        VoxError: with `--tune refresh`: the device cannot hold the run (P004), it cannot be carried
            out as planned, or the cache cannot be written.
    """
    if tunable(plan) and plan.settings.tune == "refresh":
        if hopeless := _refusal(plan, forecast(plan)):  # measuring takes steps
            raise hopeless
        tuning_cache.store(tuning_cache.cache_key(plan), search(plan, tell))
    used = cached(plan)
    planned = plan if used is None else _with(used, plan)
    seen = forecast(planned)
    hopeless = _refusal(planned, seen)
    return Advice(
        notices=tuple(() if hopeless else _notices(planned, used, seen)),
        micro_batch_tokens=used.micro_batch_tokens if used else None,
        tuning=used.tuning if used else {},
        refusal=hopeless,
    )


@hookimpl
def vox_launch(job: LaunchJob, settings: TrainSettings) -> LaunchResult:
    """Run a job's ranks on this machine.

    Raises:
        ConfigError: C004, lost ranks are to be started again.
    """
    if "max_restarts" in settings.model_fields_set:
        raise ConfigError(
            "C004",
            f"launcher {job.launcher!r} does not start lost processes again",
            where="--max-restarts",
            remedy="leave it out, or use --launcher ray",
        )
    return launch(job)


@hookimpl
def vox_write_job(kind: str, job: LaunchJob, settings: TrainSettings, image: str | None) -> str:
    """Write a job that runs a command elsewhere."""
    return write_job(kind, job, settings, image)


@hookimpl
def vox_plan_run(settings: TrainSettings, progress: Progress | None, tell: Tell) -> PlanReport:
    """Plan a run for `vox.plan`."""
    return planner.plan(settings, progress=progress, tell=tell)


def _with(tuned: Tuned, plan: RunPlan) -> RunPlan:
    execution = replace(
        plan.execution, micro_batch_tokens=tuned.micro_batch_tokens, tuning=tuned.tuning
    )
    return replace(plan, execution=execution)


def _refusal(plan: RunPlan, seen: MemoryForecast) -> PlanError | None:
    if plan.settings.allow_overcommit or not seen.hopeless:
        return None
    return refusal(plan, seen)


def _notices(plan: RunPlan, used: Tuned | None, seen: MemoryForecast) -> Iterator[Notice]:
    if used:
        yield Notice(f"{used}, which was measured to be the fastest here")
    if short := shortage(plan, seen):
        yield Notice(short, "warning")
