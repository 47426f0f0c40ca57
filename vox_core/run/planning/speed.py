"""How long a run would take: by steps of it taken now, by what tuning has kept, by an earlier run.

Measured are the first steps of the run as they are, its own documents in its own micro-batches, at
a rate of zero and by the backend itself; the first is a warm-up and counts to the loading. What the
remaining steps take follows from their tokens; so it does of validations, of which some batches are
taken. Checkpoints are left out: they are written beside the training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vox_core.contract import Batch, Event, Step, StepDone, Validation
from vox_core.data.batching import make_step_batches, validation_batches
from vox_core.errors import AdapterError
from vox_core.run.history import read_run, runs_in
from vox_core.run.metrics import peak_resident
from vox_core.run.planning.report import SpeedPlan, Work
from vox_core.run.prepare import Prepared
from vox_core.run.tuning.measure import TOKENS, Seen, go_over
from vox_core.run.tuning.search import Tell

STEPS = 8
"""At most, after the first."""
LEAST = 2
"""At least, after the first, whatever the time."""
RUNS = 20
"""Earlier runs to look at, at most."""
SECONDS = 20.0
"""After which no further step is begun."""


@dataclass(slots=True)
class Measured:
    """What some steps took.

    Args:
        seconds: of `tokens` tokens in `steps` steps, after the first.
        loading: seconds before the first step, and what that took longer than those after it.
        validating: seconds a token of a validation; None without held-out rows.
        memory: bytes, the most that were in use until then; None where nobody knows.
    """

    steps: int
    tokens: int
    seconds: float
    loading: float
    validating: float | None
    memory: int | None
    seen: Seen


def measure(prepared: Prepared, tell: Tell) -> Measured:
    """Take some steps of the run, and keep nothing.

    Raises:
        VoxError: whatever the backend cannot do under this plan; a step was not finite.
    """
    total = min(prepared.plan.contract.total_steps, 1 + STEPS)
    clock, valid = _Clock(), _some(prepared)
    until = time.perf_counter() + SECONDS
    tell("measuring some steps of the run")

    def enough() -> bool:
        return time.perf_counter() > until and len(clock.steps) > LEAST

    clock.began = time.perf_counter()
    go_over(prepared, prepared.plan, _steps(prepared, total), total, clock, enough, valid)
    return _measured(clock, valid)


def speed(
    prepared: Prepared, work: Work | None, validations: int, measured: Measured | None, runs: Path
) -> SpeedPlan | None:
    """What is known of the speed; None if nothing is.

    Args:
        runs: a folder of earlier runs.
    """
    tuned = prepared.tuned
    if measured is None and tuned is None:
        return _earlier(prepared, work, runs)
    told = _tuned(prepared, work)
    if measured is None:
        return told
    rate = measured.tokens / measured.seconds
    seconds = work.tokens / rate if work else None
    valid = prepared.valid.tokens * validations if prepared.valid else 0
    paths = measured.seen.paths
    return replace(
        told,
        tokens_per_second=rate,
        seconds=seconds,
        how="measured",
        steps=measured.steps,
        measured=time.time(),
        loading=measured.loading,
        validating=None if measured.validating is None else measured.validating * valid,
        fast=dict(paths.fast) if paths else told.fast,
        own=dict(paths.own) if paths else told.own,
    )


def _earlier(prepared: Prepared, work: Work | None, runs: Path) -> SpeedPlan | None:
    """The tokens/s of the newest run that computes the same model in the same way."""
    plan = prepared.plan
    wanted = (prepared.model.id, plan.backend, plan.device, plan.dtype, plan.contract.quant)
    for run in _newest(runs):
        try:
            told = read_run(run)
        except AdapterError:
            continue
        rate = told.tokens_per_second
        if rate and wanted == (told.model, told.backend, told.device, told.dtype, told.quant):
            return SpeedPlan(
                tokens_per_second=rate,
                seconds=work.tokens / rate if work else None,
                chosen="",
                gain=1.0,
                refused={},
                fast={},
                own={},
                measured=told.last or 0.0,
                how="earlier",
                steps=len(told.losses),
                run=told.run,
            )
    return None


def _newest(runs: Path) -> list[Path]:
    """The last runs of a folder, the newest first."""
    with suppress(AdapterError, OSError):
        return sorted(runs_in(runs), key=lambda run: run.stat().st_mtime)[: -1 - RUNS : -1]
    return []


def _tuned(prepared: Prepared, work: Work | None) -> SpeedPlan:
    tuned = prepared.tuned
    if tuned is None:
        return SpeedPlan(0.0, None, "", 1.0, {}, {}, {}, 0.0)
    return SpeedPlan(
        tokens_per_second=tuned.tokens_per_second,
        seconds=work.tokens / tuned.tokens_per_second if work else None,
        chosen=str(tuned),
        gain=tuned.gain,
        refused=tuned.refused,
        fast=tuned.fast,
        own=tuned.own,
        measured=tuned.measured,
    )


@dataclass(slots=True)
class _Clock(Seen):
    """Notes when things were told."""

    began: float = 0.0
    first: float = 0.0
    told: float = 0.0
    validations: list[float] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        Seen.__call__(self, event)
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


def _steps(prepared: Prepared, total: int) -> Iterator[Step]:
    plan, contract = prepared.plan, prepared.plan.contract
    for number in range(1, total + 1):
        batches, weight = make_step_batches(
            prepared.train,
            number,
            batch_size=contract.batch_size,
            micro_batch_tokens=plan.micro_batch_tokens,
            seed=contract.seed,
        )
        # Of the first, whose validation is as warm as those of the run.
        evaluate = number == 1 and prepared.valid is not None
        yield Step(number, batches, total_weight=weight, lr=0.0, evaluate=evaluate)


def _some(prepared: Prepared) -> Sequence[Batch]:
    """Batches of a validation, spread over it, of about `TOKENS` tokens."""
    if prepared.valid is None:
        return ()
    every = validation_batches(prepared.valid, prepared.plan.micro_batch_tokens)
    stride = max(1, prepared.valid.tokens // TOKENS)
    return [every[index] for index in range(0, len(every), stride)]
