"""`telemetry.jsonl`: the log of a run, one flushed JSON line per event, never rewritten.

    {"event": "step", "time": 1763793255.1, "step": 1, "loss": 2.31, …}

`time` is seconds since the epoch (UTC). A float that is not finite is null; a field that is None is
left out. A `Notice` is called `warning` or `notice` by its level, which is not written. A backend
may emit events of its own, with whatever fields they like. The fields of vox's own events follow
from their dataclasses, for the writer, the reader and docs/reference/telemetry.schema.json alike.

`Telemetry` writes. A crash leaves at most one torn line at the end, which the next process cuts
off. A disk that fills up does not end a run: lines wait, and are written when there is room.

`Tail` reads, while a run writes or afterwards. A line that is no JSON or does not fit its event is
skipped and counted. It is a log only: what a resume needs is in the checkpoints.

`read_run` summarises a run folder; it only reads, and imports no array library. A resumed run has
taken some steps twice: lines about a step from before the resume count no more.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from vox_core import files
from vox_core.contract import (
    Evaluation,
    Event,
    Notice,
    ObjectiveMetrics,
    Resumed,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)
from vox_core.errors import AdapterError, StorageError
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

LATEST = 2.5e11
"""Seconds since the epoch: the year 9892, before the calendar ends."""
WARNING = "warning"
TOKENS_PER_SECOND = "tokens_per_second"

_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_NULL_IS_NAN = AfterValidator(lambda value: math.nan if value is None else value)
_IN_JSON: dict[object, Any] = {
    int: _Count,
    int | None: _Count | None,
    float: Annotated[float | None, _NULL_IS_NAN],
    tuple[str, ...]: Annotated[list[str], AfterValidator(tuple)],
    Mapping[str, int]: dict[str, _Count],
    Mapping[str, float]: dict[str, float | None],
}


# --- events and lines -------------------------------------------------------------------------


def line_of(event: Event, now: float) -> dict[str, Any]:
    """Event -> the flat object that is written."""
    given = {key: finite(value) for key, value in asdict(event).items() if value is not None}
    if isinstance(event, Notice):
        del given["level"]
    if isinstance(event, StepDone):
        given[TOKENS_PER_SECOND] = round(event.tokens / max(event.seconds, 1e-9), 1)
    warning = isinstance(event, Notice) and event.level == "warning"
    return {"event": WARNING if warning else event.name, "time": round(now, 3), **given}


def event_of(line: Mapping[str, Any]) -> Event | None:
    """Line -> event; None for a name that vox does not have. ValueError if a field is wrong."""
    name = line.get("event")
    kind = kinds().get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    given = dict(models()[str(name)].model_validate(line))
    return kind(**given, **({"level": "warning"} if name == WARNING else {}))


@cache
def kinds() -> dict[str, type[Event]]:
    """Name on a line -> event; those of `vox_core.contract` alone."""
    ours = [kind for kind in Event.__subclasses__() if kind.__module__ == Event.__module__]
    return {**{kind.name: kind for kind in ours}, WARNING: Notice}


@cache
def models() -> dict[str, type[BaseModel]]:
    """Name on a line -> the fields of such a line."""
    made = dict[str, type[BaseModel]]()
    for name, kind in kinds().items():
        hints, given = get_type_hints(kind), dict[str, Any]()
        for each in fields(kind):
            if (kind, each.name) != (Notice, "level"):
                hint = hints[each.name]
                default = ... if each.default is MISSING else each.default
                given[each.name] = (_IN_JSON.get(hint, hint), default)
        made[name] = create_model(name, __config__=ConfigDict(strict=True), **given)
    return made


def finite(value: Any) -> Any:
    """The value; None for a float that is not finite, as JSON has it."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- writing ----------------------------------------------------------------------------------


class Telemetry:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, list[bytes]()
        self._begun = self._failing = False

    def __call__(self, event: Event) -> list[Notice]:
        """Append a line. The first one has to be written (StorageError); of later ones that cannot
        be, one warning is returned."""
        line = json.dumps(line_of(event, time.time()), ensure_ascii=False)
        # A surrogate, as in the name of a file that is not UTF-8, has no bytes of its own.
        self._waiting.append(line.encode("utf-8", "backslashreplace") + b"\n")
        try:
            if not self._begun:
                with files.storage_errors(self._path):
                    content = self._path.read_bytes() if self._path.exists() else b""
                    if not content.endswith(b"\n") and content:  # what a crash left
                        os.truncate(self._path, content.rfind(b"\n") + 1)
            files.append(self._path, b"".join(self._waiting))
        except StorageError as error:
            if not self._begun:
                raise
            failing, self._failing = self._failing, True
            text = f"{self._path.name} cannot be written, and waits: {error.found}"
            return [] if failing else [Notice(text, "warning")]
        self._waiting.clear()
        self._begun, self._failing = True, False
        return []


# --- reading ----------------------------------------------------------------------------------


class Line(NamedTuple):
    """Time and event of a line: seconds since the epoch, 0 if unknown; a bare `Event` if it is
    none of vox's."""

    time: float
    event: Event


class Tail:
    """Reads a file from its beginning on, and then what was added. `skipped` counts bad lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self.skipped = path, 0, 0

    def new(self) -> Iterator[Line]:
        """Whole lines since the last call; none while there is no file, A001 if it is another thing
        or cannot be read."""
        try:
            if not self._path.exists():
                return
            if not self._path.is_file():  # reading a pipe or a device would never end
                raise OSError(0, "something that is no file")
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at = 0
                file.seek(self._at)
                for piece in file:
                    if not piece.endswith(b"\n"):
                        return
                    self._at += len(piece)
                    if line := _parsed(piece):
                        yield line
                    elif piece.strip():
                        self.skipped += 1
        except OSError as error:
            what = "the telemetry of a run cannot be read"
            expected = "the telemetry.jsonl that `vox train` writes"
            found = not_a_run(self._path, error.strerror or error)
            raise found.but(what=what, expected=expected) from error


def _parsed(piece: bytes) -> Line | None:
    try:
        line = json.loads(piece)
        if not isinstance(line, dict) or not isinstance(line.get("event"), str):
            return None
        event = event_of(line) or Event()
    except (ValueError, RecursionError):
        return None
    time = line.get("time")
    known = isinstance(time, int | float) and 0 <= time < LATEST
    return Line(float(time) if known else 0.0, event)  # type: ignore[arg-type]


RUNS = Path("runs")
Status: TypeAlias = Literal["running", "done", "stopped", "failed", "died", "unreadable"]
Curve: TypeAlias = list[tuple[int, float | None]]
"""Step and loss; None where the loss was not finite."""


@dataclass(slots=True)
class Summary:
    """A run so far. None where its telemetry says nothing.

    Args:
        status: `died`: it has not ended, and no process works in its folder; `unreadable`: its
            telemetry cannot be read. `error` says why that, or why it failed.
        started, last: when the first and the last line were written, in seconds since the epoch.
        step, total_steps: the last step that counts, and the one that the run will end with.
        seconds: of work, without the time between a process that ended and a resume.
        losses, loss: of each step, and of the last one.
        held_out: validation losses, or negative rewards if `rewarded`; step 0 is before training.
        metrics: the objective's, and scores of evaluations, by name.
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
    rewarded: bool = False
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
            case Validation(number, loss, reward):
                summary.held_out.append((number, finite(loss)))
                summary.rewarded = reward is not None
            case ObjectiveMetrics(number, metrics) | Evaluation(number, metrics):
                self._metrics(number, metrics)
            case Resumed():
                self.outcome = None
                summary.resumes += 1
            case Notice(message, "warning") if message not in summary.warnings:
                summary.warnings.append(message)
            case RunEnd():
                self.outcome, summary.step, summary.error = event.outcome, event.step, event.error

    def _begin(self, start: RunStart) -> None:
        summary, self.outcome = self.summary, None
        for name in ("model", "backend", "device", "dtype", "quant", "contract", "total_steps"):
            setattr(summary, name, getattr(start, name))
        for curve in (summary.losses, summary.held_out, *summary.metrics.values()):
            curve[:] = [point for point in curve if point[0] < start.first_step]
        summary.step = max(start.first_step - 1, 0)
        summary.loss = summary.losses[-1][1] if summary.losses else None

    def _metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            curve = self.summary.metrics.setdefault(name, [])
            # A resumed run completes the evaluation after its last step.
            curve[:] = [*(point for point in curve if point[0] < step), (step, finite(value))]

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
    """Whether vox has begun a run there, or it may not be entered, which its summary says."""
    try:
        return (folder / TELEMETRY).is_file() or (folder / PLAN).is_file()
    except OSError:
        return True


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
