"""What follows from the events of a run: stopping, the best step, skipped steps, warnings.

The run asks; nothing here trains or writes a checkpoint. All that decides is a function of what was
measured, so a resumed run decides as the uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core.contract import CheckpointWritten, Event, Notice, StepDone, StepSkipped, TrainState
from vox_core.run import checkpoint, sources
from vox_core.run.folder import BAD_BATCHES, RunFolder
from vox_core.run.nonfinite import NonFiniteSteps
from vox_core.run.plan import vocabulary_size
from vox_core.run.progress import Progress
from vox_core.run.sanity import LossWatch

if TYPE_CHECKING:
    from vox_core.run.run_plan import RunPlan


class RunController:
    """Follows the events of a run that goes on after `start`.

    Args:
        progress: what was measured until now; it hears of an event before this does.
        interrupted: whether somebody asked for an end.
        out_of_time: whether `--max-time` is over.

    Attributes:
        settle: waits for a checkpoint that is under way. For the caller to set.
    """

    def __init__(
        self,
        plan: RunPlan,
        start: TrainState,
        progress: Progress,
        interrupted: Callable[[], bool],
        out_of_time: Callable[[], bool],
    ) -> None:
        contract = plan.contract
        self._run: RunFolder = plan.run
        self._sources, self._load_best = plan.sources, plan.settings.load_best_at_end
        self._progress = progress
        self._interrupted, self._out_of_time = interrupted, out_of_time
        self._nonfinite = NonFiniteSteps(
            plan.run.path / BAD_BATCHES,
            plan.settings.max_bad_steps,
            plan.data.train,
            contract.batch_size,
            contract.seed,
            after=start.step,
        )
        vocabulary = vocabulary_size(plan.inputs.config, plan.inputs.weights.tensors)
        ordered = contract.order.curriculum != "none"
        self._losses = LossWatch(vocabulary, progress, ordered=ordered)
        self._reported: set[Path] = set()
        self.settle: Callable[[], None] = lambda: None

    def __call__(self, event: Event) -> Iterator[Notice]:
        """What follows from the event.

        Raises:
            TrainingError: T001, too many steps in a row were not finite.
        """
        yield from self._losses(event)
        if isinstance(event, StepSkipped):
            yield from self._nonfinite.skipped(event, self._checkpoints)
        elif isinstance(event, StepDone):
            self._nonfinite.applied()
        elif isinstance(event, CheckpointWritten):
            yield from self._changed_files()

    def stop_requested(self) -> bool:
        return self._interrupted() or self._out_of_time() or self._progress.exhausted

    def at_end(self, state: TrainState, *, stopped: bool) -> tuple[TrainState, list[Notice]]:
        """State to write of a run that ends with `state`, and what to say of the end.

        With `--load-best-at-end` it is the best step's, unless the run was stopped before its end.
        """
        notices = [*self._losses.at_end()]
        if stopped:
            notices += self._why_stopped()
        step = self._progress.best_step
        unfinished = stopped and not self._progress.exhausted
        if unfinished or not self._load_best or step in (None, state.step):
            return state, notices
        if best := checkpoint.load_step(self._run.checkpoints, step or 0):
            notice = Notice(f"the adapter is that of the best step: {self._best()}")
            return best, [*notices, notice]
        text = f"the checkpoint of the best step, {step}, is missing or damaged"
        notice = Notice(f"{text}: the adapter is that of the last step", "warning")
        return state, [*notices, notice]

    def _why_stopped(self) -> Iterator[Notice]:
        """Why the run stopped before its last step; nothing if a signal stopped it."""
        since = self._progress.since_best
        if self._progress.exhausted:
            yield Notice(
                f"early stopping: no better held-out loss in {since} "
                f"{'validation' if since == 1 else 'validations'}; the best was {self._best()}"
            )
        elif self._out_of_time() and not self._interrupted():
            yield Notice("stopped: the time of --max-time is over")

    def _best(self) -> str:
        return f"{self._progress.best_loss:.4f} after step {self._progress.best_step}"

    def _checkpoints(self) -> list[Path]:
        self.settle()
        return checkpoint.numbered(self._run.checkpoints)

    def _changed_files(self) -> Iterator[Notice]:
        for path in sources.changed(self._sources):
            if path not in self._reported:
                self._reported.add(path)
                yield Notice(
                    f"{path} has changed since it was read; this run goes on with what was read, "
                    "and cannot be resumed unless the file is as it was",
                    "warning",
                )
