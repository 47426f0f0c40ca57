"""Run folders as they are: whether a process works in one, and what its telemetry says.

Everything here only reads and imports no array library. Lines that are wrong are passed over and
counted. A resumed run has taken some steps twice: lines about a step from before the resume count
no more. The lock of a folder is requested shared and released at once, so that two readers do not
disturb one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from vox_core.contract import (
    Event,
    Notice,
    ObjectiveMetrics,
    Resumed,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)
from vox_core.errors import AdapterError
from vox_core.run.folder import (
    CHECKPOINTS,
    MANIFEST,
    PLAN,
    TELEMETRY,
    RunFolder,
    is_worked_in,
    not_a_run,
    numbered,
    step_of,
)
from vox_core.run.telemetry import Tail, finite

RUNS = Path("runs")
Status: TypeAlias = Literal["running", "done", "stopped", "failed", "died", "unreadable"]
Curve: TypeAlias = list[tuple[int, float | None]]
"""Step and loss; None where the loss was not finite."""


@dataclass(slots=True)
class Summary:
    """A run so far. None where its telemetry says nothing.

    Args:
        status: `died`: it has not ended, and no process works in its folder; `unreadable`: its
            telemetry cannot be read, and `error` says why.
        started, last: when the first and the last line were written, in seconds since the epoch.
        step, total_steps: the last step that counts, and the one that the run will end with.
        seconds: of work, without the time between a process that ended and a resume.
        losses, loss: of each step, and of the last one.
        held_out: validation losses; step 0 is before training.
        metrics: the objective's, by name.
        tokens_per_second: over all steps that were taken.
        memory: peak bytes.
        checkpoints: steps of the checkpoints in the folder.
        passed_over: lines that could not be read.
        adapter_step: the step whose adapter is in the folder; None while there is none.
        early: done before its last step, by early stopping.
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
    metrics: dict[str, Curve] = field(default_factory=dict)
    tokens_per_second: float | None = None
    memory: int | None = None
    checkpoints: list[int] = field(default_factory=list)
    resumes: int = 0
    warnings: list[str] = field(default_factory=list)
    passed_over: int = 0
    adapter_step: int | None = None
    early: bool = False
    error: str | None = None

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


class _Tally:
    """Adds up lines."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        self.outcome: Literal["done", "stopped", "failed"] | None = None
        self._tokens, self._seconds = 0, 0.0
        self._before: float | None = None

    def add(self, time: float, event: Event) -> None:
        """Add the line that came next."""
        summary, before = self.summary, self._before
        if time:
            summary.started = time if summary.started is None else summary.started
            if before is not None and self.outcome is None and not isinstance(event, Resumed):
                summary.seconds += max(time - before, 0.0)  # a clock may have been set back
            self._before = summary.last = time
        match event:
            case RunStart():
                self._begin(event)
            case StepDone():
                self._step(event)
            case Validation(number, loss):
                summary.held_out.append((number, finite(loss)))
            case ObjectiveMetrics():
                self._metrics(event)
            case Resumed():
                self.outcome = None
                summary.resumes += 1
            case Notice(message, "warning"):
                summary.warnings.append(message)
            case RunEnd():
                self.outcome, summary.step = event.outcome, event.step

    def _begin(self, start: RunStart) -> None:
        summary, self.outcome = self.summary, None
        for name in ("model", "backend", "device", "dtype", "quant", "contract", "total_steps"):
            setattr(summary, name, getattr(start, name))
        for curve in (summary.losses, summary.held_out, *summary.metrics.values()):
            curve[:] = [point for point in curve if point[0] < start.first_step]
        summary.step = max(start.first_step - 1, 0)
        summary.loss = summary.losses[-1][1] if summary.losses else None

    def _metrics(self, measured: ObjectiveMetrics) -> None:
        for name, value in measured.metrics.items():
            self.summary.metrics.setdefault(name, []).append((measured.step, finite(value)))

    def _step(self, step: StepDone) -> None:
        summary = self.summary
        summary.step, summary.loss = step.step, finite(step.loss)
        summary.losses.append((step.step, summary.loss))
        if math.isfinite(step.seconds) and step.seconds > 0:
            self._tokens += step.tokens
            self._seconds += step.seconds
            summary.tokens_per_second = round(self._tokens / self._seconds, 1)
        if step.memory is not None:
            summary.memory = max(summary.memory or 0, step.memory)


# --- folders ----------------------------------------------------------------------------------


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder (A001 if there is none), or the folder itself if it is one; by name."""
    if is_run(folder):
        return [folder]
    try:
        return sorted(each for each in folder.iterdir() if is_run(each))
    except OSError as error:
        raise not_a_run(folder, error.strerror or error) from error


def is_run(folder: Path) -> bool:
    """Whether vox has begun a run there."""
    try:
        return (folder / TELEMETRY).is_file() or (folder / PLAN).is_file()
    except OSError:
        return False


def require_run(folder: Path) -> Path:
    """Return the folder, if it is that of a run (A001 otherwise)."""
    if is_run(folder):
        return folder
    raise not_a_run(folder, "no telemetry and no plan" if folder.is_dir() else "no such folder")


def read_run(folder: Path) -> Summary:
    """Summarise a run; A001 if it is none, or its telemetry cannot be read."""
    summary, lines = Summary(str(folder)), Tail(require_run(folder) / TELEMETRY)
    tally = _Tally(summary)
    # In this order: a process that ends in between has written of its end.
    worked_in = is_worked_in(folder)
    for line in lines.new():
        tally.add(*line)
    summary.status = tally.outcome or ("running" if worked_in else "died")
    there = numbered(folder / CHECKPOINTS)
    summary.checkpoints = sorted(step_of(each) for each in there if each.is_dir())
    summary.passed_over = lines.skipped
    if summary.status in ("done", "stopped"):  # of a run at work it is what an earlier stop left
        summary.adapter_step = _adapter_step(folder)
    total = summary.total_steps
    summary.early = summary.status == "done" and total is not None and summary.step < total
    return summary


def read_runs(folder: Path) -> list[Summary]:
    """Summarise each run of `runs_in`; one that cannot be read does not hide the others."""
    found = []
    for run in runs_in(folder):
        try:
            found.append(read_run(run))
        except AdapterError as error:
            found.append(Summary(str(run), "unreadable", error=f"{error.what}: {error.found}"))
    return found


def _adapter_step(folder: Path) -> int | None:
    if not (folder / MANIFEST).is_file():  # reading a pipe would never end
        return None
    try:
        step = RunFolder(folder).read(MANIFEST).get("step")
    except AdapterError:
        return None
    return step if type(step) is int else None
