"""A run folder while this process trains in it: its lock, its start, and the events of the run.

The first files of a run are written here: `preflight.json` and `plan.json`. A run that goes on
keeps the plan that it had, with what has changed since.

Events go to one list of subscribers, in this order: what the run has come to, `telemetry.jsonl`,
the caller, the observing plugins, the controller. A subscriber may answer with notices, which go
the same way.

A run stops after the step in which a signal came or its time was over; a second signal does not
wait for the end of the step.

Of several processes the one with rank 0 alone writes, locks, and tells observers. The others read
the run folder, as far as there is one, and decide what rank 0 decides.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from vox_core import files
from vox_core.contract import (
    CheckpointWritten,
    Event,
    Notice,
    Resumed,
    RunEnd,
    RunStart,
    StepDone,
    StepSkipped,
    TrainState,
    World,
)
from vox_core.data.tokenizer import TEMPLATE
from vox_core.errors import InputError, StorageError, VoxError
from vox_core.host.load import Observe, format_error
from vox_core.host.observers import Observers
from vox_core.host.process import ENDING, handled
from vox_core.run import artifacts, checkpoint, folder, resume
from vox_core.run.controller import RunController
from vox_core.run.hf_checkpoint import first_state
from vox_core.run.progress import Progress, StepMetrics
from vox_core.run.telemetry import Telemetry

if TYPE_CHECKING:
    from vox_core.run.run_plan import RunPlan


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal ended the run in the middle of a step.

    Args:
        step: the last step whose state was kept; None if there is none.
    """

    def __init__(self, run: Path, step: int | None) -> None:
        kept = f"step {step} is kept" if step else "no step is kept"
        super().__init__(f"{run}: stopped in the middle of a step; {kept}")
        self.run, self.step = run, step

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.run, self.step)


class StopSignal:
    """Set by the first SIGINT, SIGTERM or SIGHUP; the second one interrupts at once.

    Args:
        acknowledge: called at the first one.
    """

    def __init__(self, acknowledge: Callable[[], None] = lambda: None) -> None:
        self._event, self._acknowledge = threading.Event(), acknowledge

    def __call__(self) -> bool:
        return self._event.is_set()

    def caught(self, number: int, _frame: FrameType | None) -> None:
        if self._event.is_set() and number != signal.SIGHUP:  # a closed terminal sends two
            raise KeyboardInterrupt
        self._event.set()
        with suppress(Exception):  # it may come in the middle of other output; words are not vital
            self._acknowledge()


Subscriber: TypeAlias = Callable[[Event], Iterable[Event] | None]
STOPPING = "stopping after this step, or once the model is loaded; a second signal stops at once"


class _CallbackFailed(BaseException):
    """An exception of the caller's callback on its way through the backend, whose own errors are
    reported as the plugin's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Session:
    """A process's work on a run, from its first write to its last.

    Attributes:
        start: the state that it goes on from.
        origin: what the checkpoint of that state says of the run.
        progress: losses and validations so far.
        warnings: those of this process, in order.
        metrics: memory and times of the steps.
        signalled: whether a signal asks for the end.
    """

    start: TrainState
    origin: checkpoint.Origin
    progress: Progress
    controller: RunController

    def __init__(
        self,
        plan: RunPlan,
        observe: Observe,
        began: float,
        world: World,
        observers: Observers | None,
    ) -> None:
        self.plan, self._began, self.world = plan, began, world
        self.metrics = StepMetrics(plan.contract.total_steps, began)
        self.warnings: list[str] = []
        self._last = 0
        self._saved: int | None = None
        self.signalled = StopSignal(lambda: observe(Notice(STOPPING)))

        def tell_caller(event: Event) -> None:
            try:
                observe(event)  # whatever it returns is no answer
            except Exception as error:
                self._subscribers.remove(tell_caller)
                raise _CallbackFailed(error) from error

        self._subscribers: list[Subscriber] = [self._follow, tell_caller]
        if observers is None:
            return

        def tell_plugins(event: Event) -> list[Notice]:
            return [Notice(fault, "warning") for fault in observers.tell(event)]

        self._subscribers[1:] = [Telemetry(plan.run.telemetry), tell_caller, tell_plugins]

    @classmethod
    @contextmanager
    def open(
        cls,
        plan: RunPlan,
        observe: Observe,
        began: float,
        world: World = World(),  # noqa: B008 (frozen)
    ) -> Iterator[Self]:
        """Lock the run folder, write what a run begins with, and announce the run.

        Args:
            began: when planning did, as `time.perf_counter` counts.

        Raises:
            StoppedAtOnce: a second signal did not wait for the end of the step.
            OutputError: O001 to O003, the folder cannot be had.
        """
        with contextlib.ExitStack() as stack:
            observers, left = None, None
            if world.leads:
                if plan.fresh and plan.settings.out is None:
                    plan = replace(plan, run=folder.unused(plan.run))
                observers = stack.enter_context(
                    contextlib.closing(Observers(plan.inputs.seen.plugins))
                )
                left = stack.enter_context(folder.locked(plan.run))
                if plan.fresh and not resume.is_new(plan.run):  # made since it was planned
                    files.require_absent(plan.run.path)
            session = cls(plan, observe, began, world, observers)
            try:
                with handled(session.signalled.caught, *ENDING):
                    session._begin(left)
                    yield session
            except KeyboardInterrupt as error:
                session._end()
                raise StoppedAtOnce(plan.run.path, session._saved) from error
            except _CallbackFailed as failed:
                session._end(failed.error)
                raise failed.error from None
            except Exception as error:
                # Found by the backend before its first step: as if the run had not been begun.
                if isinstance(error, InputError) and plan.fresh and not session._last:
                    if world.leads:
                        shutil.rmtree(plan.run.path)
                else:
                    session._end(error)
                raise

    def emit(self, event: Event) -> None:
        """Tell every subscriber, and then what they answer."""
        for subscriber in self._subscribers:
            for answer in subscriber(event) or ():
                self.emit(answer)

    def elapsed(self) -> float:
        """Seconds since planning began."""
        return time.perf_counter() - self._began

    def out_of_time(self) -> bool:
        """Whether `--max-time` is over, counted from the start of planning."""
        limit = self.plan.settings.max_time
        return bool(limit) and self.elapsed() >= limit

    def interrupted(self) -> bool:
        """Whether a signal or `--max-time` asks for the end."""
        return self.signalled() or self.out_of_time()

    def stop_requested(self) -> bool:
        """Whether the run is to end: interrupted, or by early stopping."""
        return self.interrupted() or self.progress.exhausted

    def _end(self, error: Exception | None = None) -> None:
        """Tell that the run stopped, or failed with an error."""
        told = str(error) if isinstance(error, VoxError) else format_error(error) if error else None
        self.emit(RunEnd(self._last, "failed" if error else "stopped", self.elapsed(), told))

    def _follow(self, event: Event) -> None:
        match event:
            case StepDone() | StepSkipped():
                self._last = event.step
            case Resumed():
                self._last = self._saved = event.step
            case CheckpointWritten():
                self._saved = event.step
                if not (path := self.plan.run.path / folder.RECORD).exists():
                    with contextlib.suppress(StorageError):  # the next checkpoint tries again
                        files.write_json(path, {"first_checkpoint": self._saved})
            case Notice(message, "warning"):
                self.warnings.append(message)

    # --- the start ----------------------------------------------------------------------------

    def _begin(self, left: str | None) -> None:
        plan, contract = self.plan, self.plan.contract
        for worked_in in (plan.run.path, plan.run.checkpoints) if self.world.leads else ():
            files.remove_leftovers(worked_in)
        self.start = self._fresh() if plan.fresh else self._resumed()
        self.origin = before = checkpoint.origin(plan.run.checkpoints, self.start.step)
        self.progress = Progress(
            plan.settings.patience,
            before.losses,
            before.validations if before.validated == contract.validated else (),
            before.skipped_in_a_row,
        )
        self.controller = RunController(self)
        self._subscribers += [self.progress, self.controller]
        self._announce(left)

    def _fresh(self) -> TrainState:
        plan, path = self.plan, self.plan.run.path
        if not self.world.leads:
            return first_state(plan.execution, plan.inputs)
        files.write_json(path / folder.PREFLIGHT, plan.preflight())
        if skipped := plan.inputs.rows.report.listed:  # malformed and duplicate rows
            rows = [json.dumps(row.to_json(), ensure_ascii=False) + "\n" for row in skipped]
            files.write_text(path / folder.SKIPPED, "".join(rows))
        if templated := plan.inputs.model.templated:  # a resumed run reads this copy
            files.write_bytes(path / TEMPLATE, (templated / TEMPLATE).read_bytes())
        if start := plan.inputs.start:
            start.write(path, artifacts.manifest(plan.inputs, plan.execution, 0)["base"])
        planned = {"planned": plan.pinned} if plan.pinned else {}
        files.write_json(path / folder.PLAN, {**resume.metadata(plan), **planned})
        return first_state(plan.execution, plan.inputs)

    def _resumed(self) -> TrainState:
        """The newest good checkpoint's state; the plan is kept."""
        run, leads = self.plan.run, self.world.leads
        if folder.numbered(run.checkpoints):
            state, skipped = checkpoint.load_newest(run.checkpoints, set_aside=leads)
            path = str(run.checkpoints / f"step-{state.step}")
            self.emit(Resumed(state.step, path, tuple(skipped)))  # the first of this process
            for reason in skipped:
                self.emit(Notice(f"checkpoint passed over and set aside: {reason}", "warning"))
        else:
            self.emit(Notice("there is no checkpoint yet: the run begins again"))
            state = first_state(self.plan.execution, self.plan.inputs)
        if leads:
            self._keep_plan(state.step)
        return state

    def _keep_plan(self, step: int) -> None:
        """Write the plan that holds from now on, and what held before, if they differ."""
        before, now = resume.plan_of(self.plan.run), resume.metadata(self.plan)
        if made := self.plan.changes:
            change = {"after_step": step, "contract": before["digest"], "changes": made}
            before["changes"] = [*before.get("changes", []), change]
        elif before["settings"] == now["settings"]:
            return
        kept = {key: before[key] for key in ("changes", "planned") if key in before}
        files.write_json(self.plan.run.path / folder.PLAN, {**now, **kept})

    def _announce(self, left: str | None) -> None:
        plan, made, step = self.plan, self.plan.execution, self.start.step
        used = self.origin.backends
        self.emit(Notice(plan.inputs.selection.why))
        if plan.pinned:
            self.emit(Notice(f"as it was planned; the plan's digest is {plan.pinned}"))
        if left:
            self.emit(Notice(f"{left}, has ended without giving the run back; going on"))
        for change in plan.changes:
            text = f"going on after step {step} under another contract: {change}"
            self.emit(Notice(text, "warning"))
        if used and (was := used[-1].backend) != made.backend:
            text = f"going on with {made.backend} after step {step}; until there it was {was}"
            self.emit(Notice(text))
        for notice in (*plan.notices(), *plan.advice.notices):
            self.emit(notice)
        contract, data = made.contract, made.contract.data
        start = RunStart(
            run=str(plan.run.path), model=plan.inputs.model.id, backend=made.backend,
            device=made.device, dtype=made.dtype, contract=contract.digest, first_step=step + 1,
            total_steps=contract.total_steps, rows=data.rows, tokens=data.tokens,
            trained_tokens=data.trained_tokens, quant=contract.quant,
        )  # fmt: skip
        self.emit(start)
