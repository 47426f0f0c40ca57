"""Estimate how long a run takes: from steps of it taken now, from tuning, or from an earlier run.

`--measure` takes the first steps of the run, its own documents in its own micro-batches, at a
learning rate of zero and by the backend itself; the first is a warm-up and counts as loading. The
time of the other steps, and of validations, of which some batches are taken, follows from their
tokens. Checkpoints are left out: they are written beside the training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vox_core.api.plans import (
    RunPlan,
    Tell,
    make_step_batches,
    peak_resident,
    validation_batches,
)
from vox_core.api.runs import read_run, runs_in
from vox_core.contract import Batch, Event, Step, StepDone, Validation
from vox_core.errors import AdapterError
from vox_plan.report import SpeedPlan, StepPlan
from vox_plan.stopwatch import TOKENS, StepLog, run_steps
from vox_plan.tuning_cache import Tuned

STEPS = 8
"""At most, after the first."""
LEAST = 2
"""At least, after the first, whatever the time."""
RUNS = 20
"""Earlier runs to read, at most."""
SECONDS = 20.0
"""After which no further step begins."""


@dataclass(slots=True)
class Measured:
    """Timing of some steps.

    Args:
        seconds: of `tokens` tokens in `steps` steps, after the first.
        loading: seconds before the first step, and what that took longer than those after it.
        validating: seconds a token of a validation; None without held-out rows.
        memory: peak bytes in use until then; None if unknown.
    """

    steps: int
    tokens: int
    seconds: float
    loading: float
    validating: float | None
    memory: int | None
    log: StepLog


def measure(run: RunPlan, tell: Tell) -> Measured:
    """Take some steps of the run, and keep nothing.

    Raises:
        VoxError: whatever the backend cannot do under this plan; a step was not finite.
    """
    total = min(run.contract.total_steps, 1 + STEPS)
    clock, valid = _Clock(), _some(run)
    until = time.perf_counter() + SECONDS
    tell("measuring some steps of the run")

    def enough() -> bool:
        return time.perf_counter() > until and len(clock.steps) > LEAST

    clock.began = time.perf_counter()
    run_steps(run, run.execution, _steps(run, total), total, clock, enough, valid)
    return _measured(clock, valid)


def speed(
    run: RunPlan, steps: StepPlan, measured: Measured | None, tuned: Tuned | None, runs: Path
) -> SpeedPlan | None:
    """From the steps just measured, or from tuning, or from the newest run like it in `runs`; None
    if there is none of them."""
    tokens = steps.work.tokens if steps.work else None
    if measured is None and tuned is None:
        return _earlier(run, tokens, runs)
    plan = _tuned(tuned, tokens) if tuned else SpeedPlan(0.0)
    if measured is None:
        return plan
    rate, paths = measured.tokens / measured.seconds, measured.log.paths
    valid = run.data.valid.tokens * steps.validations if run.data.valid else 0
    return replace(
        plan,
        tokens_per_second=rate,
        seconds=tokens / rate if tokens else None,
        how="measured",
        steps=measured.steps,
        measured=time.time(),
        loading=measured.loading,
        validating=None if measured.validating is None else measured.validating * valid,
        fast=dict(paths.fast) if paths else plan.fast,
        own=dict(paths.own) if paths else plan.own,
    )


def _earlier(run: RunPlan, tokens: int | None, runs: Path) -> SpeedPlan | None:
    """The tokens/s of the newest run of the same model, backend, device and precision."""
    plan = run.execution
    wanted = (run.inputs.model.id, plan.backend, plan.device, plan.dtype, plan.contract.quant)
    for folder in _newest(runs):
        try:
            found = read_run(folder)
        except AdapterError:
            continue
        rate = found.tokens_per_second
        if rate and wanted == (found.model, found.backend, found.device, found.dtype, found.quant):
            return SpeedPlan(
                tokens_per_second=rate,
                seconds=tokens / rate if tokens else None,
                measured=found.last or 0.0,
                how="earlier",
                steps=len(found.losses),
                run=found.run,
            )
    return None


def _newest(runs: Path) -> list[Path]:
    with suppress(AdapterError, OSError):
        return sorted(runs_in(runs), key=lambda run: run.stat().st_mtime)[: -1 - RUNS : -1]
    return []


def _tuned(tuned: Tuned, tokens: int | None) -> SpeedPlan:
    return SpeedPlan(
        tokens_per_second=tuned.tokens_per_second,
        seconds=tokens / tuned.tokens_per_second if tokens else None,
        chosen=str(tuned),
        gain=tuned.gain,
        refused=tuned.refused,
        fast=tuned.fast,
        own=tuned.own,
        measured=tuned.measured,
    )


@dataclass(slots=True)
class _Clock(StepLog):
    """When events came."""

    began: float = 0.0
    first: float = 0.0
    told: float = 0.0
    validations: list[float] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        StepLog.__call__(self, event)
        if isinstance(event, StepDone) and not self.first:
            self.first = now
        elif isinstance(event, Validation):
            self.validations.append(now - self.told)
        self.told = now


def _measured(clock: _Clock, valid: Sequence[Batch]) -> Measured:
    first, *rest = clock.steps
    counted = rest or [first]  # a run of one step
    tokens, seconds = sum(d.tokens for d in counted), sum(d.seconds for d in counted)
    loading = clock.first - clock.began - first.tokens * seconds / tokens
    validating = None
    if valid:
        took = clock.validations[-1]
        validating = took / sum(len(batch.tokens_T) for batch in valid)
        loading -= took  # that before the first step
    told = [step.memory for step in clock.steps if step.memory is not None]
    memory = max(told) if told else peak_resident()
    return Measured(len(counted), tokens, seconds, max(loading, 0.0), validating, memory, clock)


def _steps(run: RunPlan, total: int) -> Iterator[Step]:
    plan, contract = run.execution, run.contract
    for number in range(1, total + 1):
        batches, weight = make_step_batches(
            run.data.train,
            number,
            batch_size=contract.batch_size,
            micro_batch_tokens=plan.micro_batch_tokens,
            seed=contract.seed,
            packing=plan.packing,
        )
        # Of the first, whose validation is as warm as those of the run.
        evaluate = number == 1 and run.data.valid is not None
        yield Step(number, batches, total_weight=weight, lr=0.0, evaluate=evaluate)


def _some(run: RunPlan) -> Sequence[Batch]:
    """Batches of a validation, spread over it, of about `TOKENS` tokens."""
    if run.data.valid is None:
        return ()
    plan = run.execution
    every = validation_batches(run.data.valid, plan.micro_batch_tokens, plan.packing)
    stride = max(1, run.data.valid.tokens // TOKENS)
    return [every[index] for index in range(0, len(every), stride)]
