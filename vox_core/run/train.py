"""`vox train`: from settings to a run folder.

First everything that can be wrong is looked at (`ready.py`); nothing is written until all of it
holds. Then the backend trains, and what it returns is written here: checkpoints, the adapter in
PEFT's layout, its manifest, the tokenizer, the model card.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vox_core import files, models
from vox_core.adapter.initial import initial_adapter
from vox_core.config import TrainSettings
from vox_core.contract import (
    AdapterState,
    CheckpointWritten,
    Event,
    Notice,
    Resumed,
    RunEnd,
    RunStart,
    Step,
    StepDone,
    StepSkipped,
    TrainJob,
    TrainResult,
    TrainState,
)
from vox_core.data.order import epochs_after, make_step_batches, validation_batches
from vox_core.errors import InputError, StorageError, WorkError
from vox_core.host import Origin
from vox_core.host.observers import Observers
from vox_core.run import card, checkpoint, folder, foresight, outputs, resume
from vox_core.run.checkpoint import Retention
from vox_core.run.context import Context, Observe, ignore
from vox_core.run.gauge import Gauge
from vox_core.run.policy import Policy
from vox_core.run.prepare import preflight
from vox_core.run.ready import Ready, make_ready
from vox_core.run.recorded import last_step, plan_of
from vox_core.run.rescue import rescued
from vox_core.run.schedule import learning_rate
from vox_core.run.sources import to_json
from vox_core.run.startup import Startup
from vox_core.run.stop import StoppedAtOnce, StopSignal, TimeLimit
from vox_core.run.telemetry import Telemetry
from vox_core.run.trained import as_trained
from vox_core.run.writer import CheckpointWriter, Due
from vox_core.weights import Weights

STOPPING = "stopping after this step; a second signal stops at once"


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What came of a run. Losses are None where nothing was measured.

    Args:
        seconds: from the first write to the last.
        startup_seconds: from the start of the command to the end of the first step.
        best_step, best_loss: the best validation after a step.
        adapter_step: the step whose adapter was written.
    """

    run: Path
    stopped: bool
    steps: int
    total_steps: int
    seconds: float
    startup_seconds: float | None
    loss: float | None
    valid_before: float | None
    valid_after: float | None
    best_step: int | None = None
    best_loss: float | None = None
    adapter_step: int | None = None


def train(
    settings: TrainSettings,
    *,
    observe: Observe = ignore,
    backend_origin: Origin | None = None,
    progress: models.Progress | None = None,
    began: float | None = None,
) -> TrainReport:
    """Train, or go on with `settings.resume`.

    Args:
        observe: told of every event, after the telemetry and before the plugins that observe.
        backend_origin: where `settings.backend` was said, for the words of an error.
        progress: told of downloads and conversions.
        began: when the command did, as `time.perf_counter` counts; without it, now.

    Raises:
        InputError: anything wrong that could be found before the first step; nothing was written.
        WorkError: something failed while working; the run folder keeps what was done.
        StoppedAtOnce: a second signal did not wait for the end of the step.
    """
    limit_from = time.perf_counter() if began is None else began
    with Startup(began) as startup:
        ready = make_ready(
            settings, backend_origin, progress, tell=lambda text: observe(Notice(text))
        )
        if ready.ended:
            observe(Notice(f"the run has finished already ({ready.ended}); there is nothing to do"))
            return _ended(ready)
        return _Run(ready, observe, startup, limit_from).execute()


def _ended(ready: Ready) -> TrainReport:
    """Of a run that had finished before this command."""
    last = last_step(ready.run)
    before, after = outputs.held_out(ready.run, last)
    return TrainReport(
        run=ready.run.path,
        stopped=False,
        steps=last,
        total_steps=ready.prepared.plan.contract.total_steps,
        seconds=0.0,
        startup_seconds=None,
        loss=None,
        valid_before=before,
        valid_after=after,
    )


class _Run:
    """One run, from the first write to the last."""

    def __init__(self, ready: Ready, observe: Observe, startup: Startup, limit_from: float) -> None:
        self._ready, self._settings, self._run = ready, ready.settings, ready.run
        self._prepared, self._contract = ready.prepared, ready.prepared.plan.contract
        self._outer, self._telemetry = observe, Telemetry(ready.run.telemetry)
        self._gauge = Gauge(self._contract.total_steps)
        self._observers = Observers()
        self._started, self._last = time.perf_counter(), 0
        self._loss: float | None = None
        self._startup = startup
        self._startup_seconds: float | None = None
        self._stop = StopSignal(lambda: observe(Notice(STOPPING)))
        limit = TimeLimit(ready.settings.max_time, limit_from)
        self._policy = Policy(ready.settings, ready.prepared, ready.run, self._stop, limit)
        self._saved: int | None = None

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
            start = self._start(self._ready.fresh)
            self._policy.begin(start)
            self._announce(start, left)
            result = self._work(start)
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
        for told in self._policy.hear(event):
            self._tell(told)

    def _tell(self, event: Event) -> None:
        faults = self._telemetry(event)
        self._outer(event)
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

    def _start(self, fresh: bool) -> TrainState:
        """The state to start from: the core's seeded adapter, or the newest good checkpoint."""
        if fresh:
            files.write_json(self._run.path / folder.PREFLIGHT, preflight(self._prepared))
            files.write_json(self._run.path / folder.PLAN, self._plan_json())
            return TrainState(0, self._initial_adapter())
        for worked_in in (self._run.path, self._run.checkpoints):
            files.remove_leftovers(worked_in)
        state = self._resumed()
        self._keep_plan(state.step)
        return state

    def _resumed(self) -> TrainState:
        if not checkpoint.numbered(self._run.checkpoints):
            self._observe(Notice("there is no checkpoint yet: the run begins again"))
            return TrainState(0, self._initial_adapter())
        state, skipped = checkpoint.load_newest(self._run.checkpoints)
        path = str(self._run.checkpoints / f"step-{state.step}")
        self._observe(Resumed(state.step, path, tuple(skipped)))  # the first of this process
        for reason in skipped:
            self._observe(Notice(f"checkpoint passed over and set aside: {reason}", "warning"))
        self._last = self._saved = state.step
        return state

    def _keep_plan(self, step: int) -> None:
        """The plan that holds from now on, and what held before, if there is a difference."""
        before, now = plan_of(self._run), self._plan_json()
        changes = before.get("changes", [])
        if self._ready.changes:
            told = {
                "after_step": step,
                "contract": before["digest"],
                "changes": self._ready.changes,
            }
            changes = [*changes, told]
        elif before["settings"] == now["settings"]:
            return
        now |= {"changes": changes} if changes else {}
        files.write_json(self._run.path / folder.PLAN, now)

    def _plan_json(self) -> dict[str, Any]:
        return {
            **self._prepared.plan.to_json(),
            "settings": resume.recorded(self._settings),
            "sources": to_json(self._prepared.sources),
        }

    def _initial_adapter(self) -> AdapterState:
        made = self._prepared.plan
        return initial_adapter(
            made.modules,
            self._contract.adapter,
            self._contract.seed,
            self._weights_to_train_on().read,
            made.saved,
        )

    def _weights_to_train_on(self) -> Weights:
        """The base as the backend will see it: DoRA's magnitudes are the norms of those weights."""
        made, prepared = self._prepared.plan, self._prepared
        model_type = self._contract.model.model_type
        return as_trained(prepared.weights, self._contract.quant, model_type, made.dtype)

    def _announce(self, start: TrainState, left: str | None) -> None:
        self._observe(Notice(self._prepared.selection.why))
        if left:
            self._observe(Notice(f"{left}, has ended without giving the run back; going on"))
        for change in self._ready.changes:
            text = f"going on after step {start.step} under another contract: {change}"
            self._observe(Notice(text, "warning"))
        if moved := resume.moved(self._run, self._prepared.plan.backend, start.step):
            self._observe(moved)
        for notice in self._prepared.notices():
            self._observe(notice)
        if short := foresight.warning(self._prepared):
            self._observe(short)
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
            contextlib.closing(self._writer(start)) as writer,
        ):
            self._policy.settle = writer.settle
            context = Context(
                seed=self._contract.seed,
                scratch=Path(scratch),
                observe=self._observe,
                checkpoints=writer,
                stop_requested=self._policy.stop_requested,
            )
            result = self._prepared.backend.train(self._job(start), context)
            try:
                writer.finish(result.state)
            except StorageError as error:
                raise rescued(error, self._run, self._prepared, result.state) from error
        return result

    def _writer(self, start: TrainState) -> CheckpointWriter:
        settings, data, size = self._settings, self._contract.data, self._contract.batch_size
        before = checkpoint.origin(self._run.checkpoints, start.step)
        return CheckpointWriter(
            self._run.checkpoints,
            self._observe,
            origin=replace(
                before,
                contract=self._contract.digest,
                backend=self._prepared.plan.backend,
                seed=self._contract.seed,
                valid_digest=self._contract.data.valid_digest,
                versions=card.versions(),
            ),
            due=Due(
                steps=settings.save_every,
                minutes=settings.save_minutes,
                epochs=settings.save_epochs,
                epoch_of=partial(epochs_after, data.rows, size),
            ),
            retention=Retention(settings.keep, settings.keep_every),
            validated=self._policy.validated,
        )

    def _job(self, start: TrainState) -> TrainJob:
        valid, made = self._prepared.valid, self._prepared.plan
        cut = (made.micro_batch_tokens, made.packing)
        return TrainJob(
            plan=made,
            model=self._prepared.model.path,
            steps=self._steps(start.step + 1),
            start=start,
            validation=validation_batches(valid, *cut) if valid else (),
        )

    def _steps(self, first: int) -> Iterator[Step]:
        contract, dataset = self._contract, self._prepared.train
        rows, total, every = contract.data.rows, contract.total_steps, self._settings.eval_every
        if self._policy.best.exhausted:  # killed after its last step, before it had written all
            return
        for number in range(first, total + 1):
            batches, weight = make_step_batches(
                dataset,
                number,
                batch_size=contract.batch_size,
                micro_batch_tokens=self._prepared.plan.micro_batch_tokens,
                seed=contract.seed,
                packing=self._prepared.plan.packing,
            )
            due = number == total or (every and not number % every)
            yield Step(
                number=number,
                batches=batches,
                total_weight=weight,
                lr=learning_rate(contract.optimizer, number, total),
                evaluate=bool(due and self._prepared.valid),
                epoch=epochs_after(rows, contract.batch_size, number),
            )

    def _report(self, result: TrainResult, written: TrainState) -> TrainReport:
        best = self._policy.best
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
        )
