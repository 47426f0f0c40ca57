"""`vox train`: from settings to a run folder.

First everything that can be wrong is looked at (`ready.py`); nothing is written until all of it
holds. Then the run has a state to start from (`start.py`), the backend trains what it is given
(`job.py`), and what it returns is written (`outputs.py`).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from vox_core import models
from vox_core.config import TrainSettings
from vox_core.contract import (
    CheckpointWritten,
    Event,
    Notice,
    Resumed,
    RunEnd,
    RunStart,
    StepDone,
    StepSkipped,
    TrainResult,
    TrainState,
)
from vox_core.errors import InputError, StorageError, WorkError
from vox_core.host import Origin
from vox_core.host.observers import Observers
from vox_core.run import folder, outputs, resume
from vox_core.run.advice import with_advice
from vox_core.run.context import Context, Observe, ignore
from vox_core.run.gauge import Gauge
from vox_core.run.job import checkpoint_writer, train_job
from vox_core.run.planned import Planned
from vox_core.run.policy import Policy
from vox_core.run.ready import Ready, make_ready
from vox_core.run.report import TrainReport, of_ended
from vox_core.run.rescue import rescued
from vox_core.run.start import begin
from vox_core.run.startup import Startup
from vox_core.run.stop import StoppedAtOnce, StopSignal, TimeLimit
from vox_core.run.telemetry import Telemetry

STOPPING = "stopping after this step; a second signal stops at once"


def train(
    settings: TrainSettings,
    *,
    observe: Observe = ignore,
    backend_origin: Origin | None = None,
    progress: models.Progress | None = None,
    began: float | None = None,
    planned: Planned | None = None,
) -> TrainReport:
    """Train, or go on with `settings.resume`.

    Args:
        observe: told of every event, after the telemetry and before the plugins that observe.
        backend_origin: where `settings.backend` was said, for the words of an error.
        progress: told of downloads and conversions.
        began: when the command did, as `time.perf_counter` counts; without it, now.
        planned: the plan that the run is held against; `settings` are its own.

    Raises:
        InputError: anything wrong that could be found before the first step; nothing was written.
        WorkError: something failed while working; the run folder keeps what was done.
        StoppedAtOnce: a second signal did not wait for the end of the step.
    """
    limit_from = time.perf_counter() if began is None else began
    tell = lambda text: observe(Notice(text))  # noqa: E731
    with Startup(began) as startup:
        ready = make_ready(settings, backend_origin, progress, tell=tell, planned=planned)
        if ready.ended:
            observe(Notice(f"the run has finished already ({ready.ended}); there is nothing to do"))
            return of_ended(ready)
        ready = with_advice(ready, tell)
        if ready.advice.refusal:
            raise ready.advice.refusal
        return _Run(ready, observe, startup, limit_from).execute()


class _Run:
    """One run, from the first write to the last."""

    def __init__(self, ready: Ready, observe: Observe, startup: Startup, limit_from: float) -> None:
        self._ready, self._settings, self._run = ready, ready.settings, ready.run
        self._prepared, self._contract = ready.prepared, ready.prepared.plan.contract
        self._outer, self._telemetry = observe, Telemetry(ready.run.telemetry)
        self._gauge = Gauge(self._contract.total_steps)
        self._observers = Observers(seen=ready.prepared.seen)
        self._started, self._last = time.perf_counter(), 0
        self._loss: float | None = None
        self._startup = startup
        self._startup_seconds: float | None = None
        self._stop = StopSignal(lambda: observe(Notice(STOPPING)))
        limit = TimeLimit(ready.settings.max_time, limit_from)
        self._policy = Policy(ready.settings, ready.prepared, ready.run, self._stop, limit)
        self._saved: int | None = None
        self._warnings: list[str] = []

    def execute(self) -> TrainReport:
        fresh = self._ready.fresh
        with contextlib.closing(self._observers):
            if (fresh and not resume.is_new(self._run)) or not self._run.path.exists():
                folder.claim(self._run)
            with folder.locked(self._run) as left:
                try:
                    return self._report(*self._go(left))
                except KeyboardInterrupt as error:
                    self._observe(RunEnd(self._last, "stopped", self._elapsed()))
                    raise StoppedAtOnce(self._run.path, self._saved) from error
                except WorkError:
                    self._observe(RunEnd(self._last, "failed", self._elapsed()))
                    raise
                except InputError:
                    # Found by the backend before its first step: as if the run had not been begun.
                    if fresh and not self._last:
                        shutil.rmtree(self._run.path)
                    raise

    def _go(self, left: str | None) -> tuple[TrainResult, TrainState]:
        """What came of it, and the state that was written."""
        with self._stop.installed():
            start = begin(self._ready, self._observe)
            self._policy.begin(start)
            self._announce(start, left)
            result = self._work(start)
            if bad := self._policy.ended():
                self._observe(bad)
            if result.stopped and (why := self._policy.why()):
                self._observe(why)
            result = replace(result, stopped=result.stopped and not self._policy.best.exhausted)
            written = self._write(result)
            self._observe(
                RunEnd(result.state.step, "stopped" if result.stopped else "done", self._elapsed())
            )
            return result, written

    def _write(self, result: TrainResult) -> TrainState:
        """Write what the run leaves; the state whose adapter that is."""
        written, best = result.state, self._policy.best
        if not result.stopped:
            written, notice = self._policy.at_end(written)
            if notice:
                self._observe(notice)
        loss = best.loss if written.step == best.step else None
        outputs.write(self._run, self._prepared, written, result.state.step, loss)
        return written

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def _observe(self, event: Event) -> None:
        if isinstance(event, StepDone | StepSkipped):
            self._last = event.step
        if isinstance(event, StepDone):
            event, self._loss = self._measured(event), event.loss
        elif isinstance(event, CheckpointWritten):
            self._saved = event.step
        elif isinstance(event, Resumed):
            self._last = self._saved = event.step
        for told in self._policy.hear(event):
            self._tell(told)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Notice) and event.level == "warning":
            self._warnings.append(event.message)
        faults = self._telemetry(event)
        self._outer(event)
        self._warnings += faults
        for fault in faults:
            self._outer(Notice(fault, "warning"))
        for fault in self._observers.tell(event):
            self._tell(Notice(fault, "warning"))

    def _measured(self, event: StepDone) -> StepDone:
        event = self._gauge.read(event)
        if self._startup_seconds is None:
            self._startup_seconds = round(self._startup.finish(), 3)
            event = replace(event, startup_seconds=self._startup_seconds)
        return event

    def _announce(self, start: TrainState, left: str | None) -> None:
        self._observe(Notice(self._prepared.selection.why))
        if self._ready.planned:
            self._observe(Notice(f"as it was planned; the plan's digest is {self._ready.planned}"))
        if left:
            self._observe(Notice(f"{left}, has ended without giving the run back; going on"))
        for change in self._ready.changes:
            text = f"going on after step {start.step} under another contract: {change}"
            self._observe(Notice(text, "warning"))
        if moved := resume.moved(self._run, self._prepared.plan.backend, start.step):
            self._observe(moved)
        for notice in (*self._prepared.notices(), *self._ready.advice.notices):
            self._observe(notice)
        made, data = self._prepared.plan, self._contract.data
        self._observe(
            RunStart(
                run=str(self._run.path),
                model=self._prepared.model.id,
                backend=made.backend,
                device=made.device,
                dtype=made.dtype,
                contract=self._contract.digest,
                first_step=start.step + 1,
                total_steps=self._contract.total_steps,
                rows=data.rows,
                tokens=data.tokens,
                trained_tokens=data.trained_tokens,
                quant=self._contract.quant,
            )
        )

    def _work(self, start: TrainState) -> TrainResult:
        with (
            tempfile.TemporaryDirectory(prefix="vox-") as scratch,
            contextlib.closing(
                checkpoint_writer(self._ready, start, self._observe, self._policy.validated)
            ) as writer,
        ):
            self._policy.settle = writer.settle
            context = Context(
                seed=self._contract.seed,
                scratch=Path(scratch),
                observe=self._observe,
                checkpoints=writer,
                stop_requested=self._policy.stop_requested,
            )
            job = train_job(self._ready, start, lambda: self._policy.best.exhausted)
            result = self._prepared.backend.train(job, context)
            try:
                writer.finish(result.state)
            except StorageError as error:
                raise rescued(error, self._run, self._prepared, result.state) from error
        return result

    def _report(self, result: TrainResult, written: TrainState) -> TrainReport:
        best, settings = self._policy.best, self._ready.settings
        before, after = outputs.held_out(self._run, result.state.step)
        return TrainReport(
            run=self._run.path,
            stopped=result.stopped,
            steps=result.state.step,
            total_steps=self._contract.total_steps,
            seconds=self._elapsed(),
            startup_seconds=self._startup_seconds,
            loss=self._loss,
            valid_before=before,
            valid_after=after,
            best_step=best.step,
            best_loss=None if best.step is None else best.loss,
            adapter_step=written.step,
            rows=self._contract.data.rows,
            epochs=None if settings.max_steps else settings.epochs,
            warnings=tuple(self._warnings),
        )
