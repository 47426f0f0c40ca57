"""A run in a few numbers and two curves, from its telemetry.

A resumed run has taken some steps twice: what was told of a step before the resume counts no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from vox_core.contract import (
    CheckpointWritten,
    Notice,
    Resumed,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)
from vox_core.run.lines import Told

Status: TypeAlias = Literal["running", "done", "stopped", "failed", "died"]
Curve: TypeAlias = list[tuple[int, float | None]]
"""Step and loss; None where the loss was not finite."""


@dataclass(slots=True)
class Summary:
    """A run so far. None where nothing was told.

    Args:
        run: the folder.
        status: `died`: it has not ended, and no process works in its folder.
        started, last: when the first and the last line were written, in seconds since the epoch.
        step, total_steps: the last step that counts, and the one that the run will end with.
        seconds: of work, the time between a process that ended and a resume not counted.
        loss: of the last step.
        losses: of each step.
        held_out: validation losses; step 0 is before training.
        tokens_per_second: over all steps that were taken.
        memory: bytes, the most that any step told of.
        checkpoints: the steps whose checkpoints are in the folder.
        resumes: how often the run was gone on with.
        warnings: what it was warned of, in order.
        passed_over: lines that could not be read.
        adapter_step: the step whose adapter is in the folder; None while there is none.
        early: it is done before its last step, as its held-out loss got no better.
    """

    run: str
    status: Status = "died"
    model: str | None = None
    backend: str | None = None
    device: str | None = None
    dtype: str | None = None
    quant: str | None = None
    contract: str | None = None
    started: float | None = None
    last: float | None = None
    step: int = 0
    total_steps: int | None = None
    seconds: float = 0.0
    loss: float | None = None
    losses: Curve = field(default_factory=list)
    held_out: Curve = field(default_factory=list)
    tokens_per_second: float | None = None
    memory: int | None = None
    checkpoints: list[int] = field(default_factory=list)
    resumes: int = 0
    warnings: list[str] = field(default_factory=list)
    passed_over: int = 0
    adapter_step: int | None = None
    early: bool = False

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the lowest held-out loss, and that; before training does not count."""
        known = [(loss, step) for step, loss in self.held_out if step and loss is not None]
        return min(known)[::-1] if known else None

    @property
    def chosen(self) -> bool:
        """The adapter is not that of the last step."""
        return self.adapter_step is not None and self.adapter_step < self.step

    @property
    def judged(self) -> tuple[int, float] | None:
        """The held-out loss of the adapter that is there, or else the last that was measured, with
        its step."""
        known = {step: loss for step, loss in self.held_out if step and loss is not None}
        if not known:
            return None
        step = self.adapter_step if self.chosen and self.adapter_step in known else max(known)
        assert step is not None
        return step, known[step]


class Tally:
    """Adds up what lines tell."""

    def __init__(self, run: str) -> None:
        self.summary = Summary(run)
        self.outcome: Literal["done", "stopped", "failed"] | None = None
        self._tokens, self._seconds = 0, 0.0
        self._before: float | None = None

    def add(self, lines: Iterable[Told]) -> None:
        """The lines that came next."""
        for told in lines:
            self._add_time(told)
            self._add(told)

    def _add_time(self, told: Told) -> None:
        summary = self.summary
        if not told.time:
            return
        if summary.started is None:
            summary.started = told.time
        at_work = self.outcome is None and not isinstance(told.event, Resumed)
        if self._before is not None and at_work:
            summary.seconds += max(told.time - self._before, 0.0)  # a clock may have been set back
        self._before = summary.last = told.time

    def _add(self, told: Told) -> None:
        summary = self.summary
        match told.event:
            case RunStart() as start:
                self._begin(start)
            case StepDone() as step:
                self._step(step)
            case Validation(number, loss):
                summary.held_out.append((number, _finite(loss)))
            case CheckpointWritten():
                pass  # the folder says which are there
            case Resumed():
                self.outcome = None
                summary.resumes += 1
            case Notice(message, "warning"):
                summary.warnings.append(message)
            case RunEnd() as end:
                self.outcome, summary.step = end.outcome, end.step

    def _begin(self, start: RunStart) -> None:
        summary, self.outcome = self.summary, None
        for name in ("model", "backend", "device", "dtype", "quant", "contract", "total_steps"):
            setattr(summary, name, getattr(start, name))
        summary.losses = [point for point in summary.losses if point[0] < start.first_step]
        summary.held_out = [point for point in summary.held_out if point[0] < start.first_step]
        summary.step = max(start.first_step - 1, 0)
        summary.loss = summary.losses[-1][1] if summary.losses else None

    def _step(self, step: StepDone) -> None:
        summary = self.summary
        summary.step, summary.loss = step.step, _finite(step.loss)
        summary.losses.append((step.step, summary.loss))
        if math.isfinite(step.seconds) and step.seconds > 0:
            self._tokens += step.tokens
            self._seconds += step.seconds
            summary.tokens_per_second = round(self._tokens / self._seconds, 1)
        if step.memory is not None:
            summary.memory = max(summary.memory or 0, step.memory)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
