"""What follows from the events of a run: stopping, the best step, bad batches, warnings.

The run asks; nothing here trains or writes a checkpoint. All that decides is a function of what was
measured, so a resumed run decides as the uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from vox_core.config import TrainSettings
from vox_core.contract import (
    CheckpointWritten,
    Event,
    Notice,
    StepDone,
    StepSkipped,
    TrainState,
    Validation,
)
from vox_core.plan import vocabulary_size
from vox_core.run import checkpoint, sources
from vox_core.run.bad import BadSteps
from vox_core.run.best import Best
from vox_core.run.folder import BAD_BATCHES, RunFolder
from vox_core.run.history import Tally
from vox_core.run.lines import Lines
from vox_core.run.prepare import Prepared
from vox_core.run.sanity import LossWatch


class Policy:
    """Follows the events of a run.

    Args:
        stop: whether somebody asked for an end.
        out_of_time: whether `--max-time` is over.

    Attributes:
        settle: waits for a checkpoint that is under way. For the caller to set.
    """

    def __init__(
        self,
        settings: TrainSettings,
        prepared: Prepared,
        run: RunFolder,
        stop: Callable[[], bool],
        out_of_time: Callable[[], bool],
    ) -> None:
        contract = prepared.plan.contract
        self._settings, self._run, self._sources = settings, run, prepared.sources
        self._valid_digest = contract.data.valid_digest
        self._stop, self._out_of_time = stop, out_of_time
        self._bad = BadSteps(
            run.path / BAD_BATCHES,
            settings.max_bad_steps,
            prepared.train,
            contract.batch_size,
            contract.seed,
        )
        vocabulary = vocabulary_size(prepared.config, prepared.weights.tensors)
        self._losses = LossWatch(vocabulary, ordered=contract.order.curriculum != "none")
        self.best = Best(settings.patience)
        self._told: set[Path] = set()
        self.settle: Callable[[], None] = lambda: None

    def begin(self, start: TrainState) -> None:
        """Go on after `start`, knowing what came before it."""
        before = checkpoint.origin(self._run.checkpoints, start.step)
        if before.valid_digest == self._valid_digest:  # losses of other rows say nothing of these
            if before.best:
                self.best.step, self.best.loss = before.best.step, before.best.loss
            self.best.since = before.since_best
        self._bad.begin(start.step)
        self._losses.begin(self._losses_until(start.step))

    def _losses_until(self, step: int) -> list[float]:
        tally = Tally(str(self._run.path))
        tally.add(Lines(self._run.telemetry).new())
        return [loss for at, loss in tally.summary.losses if at <= step and loss is not None]

    def hear(self, event: Event) -> Iterator[Event]:
        """The event, and what follows from it.

        Raises:
            TrainingError: T001, too many steps in a row were not finite.
        """
        yield event
        yield from self._losses.hear(event)
        if isinstance(event, StepSkipped):
            yield from self._bad.skipped(event, self._checkpoints)
        elif isinstance(event, StepDone):
            self._bad.good()
        elif isinstance(event, Validation):
            self.best.see(event)
        elif isinstance(event, CheckpointWritten):
            yield from self._changed_files()

    def validated(self) -> tuple[checkpoint.Best | None, int]:
        """The step whose checkpoint is made, and kept, for its validation; and how many validations
        came after it."""
        best = self.best
        found = None if best.step is None else checkpoint.Best(step=best.step, loss=best.loss)
        return found, best.since

    def stop_requested(self) -> bool:
        return self._stop() or self._out_of_time() or self.best.exhausted

    def ended(self) -> Notice | None:
        """A warning about the losses of all steps, where there is reason for one."""
        return self._losses.at_end()

    def why(self) -> Notice | None:
        """Why the run stopped before its last step; None if somebody asked for it."""
        if self.best.exhausted:
            return Notice(
                f"early stopping: no better held-out loss in {self.best.since} "
                f"{'validation' if self.best.since == 1 else 'validations'}; the best was "
                f"{self._best_words()}"
            )
        if self._out_of_time() and not self._stop():
            return Notice("stopped: the time of --max-time is over")
        return None

    def at_end(self, state: TrainState) -> tuple[TrainState, Notice | None]:
        """What is written of a run that has ended with `state`: with `--load-best-at-end` the
        state of the best step; and what to say of it."""
        step = self.best.step
        if not self._settings.load_best_at_end or step is None or step == state.step:
            return state, None
        if found := checkpoint.load_step(self._run.checkpoints, step):
            return found, Notice(f"the adapter is that of the best step: {self._best_words()}")
        text = f"the checkpoint of the best step, {step}, is missing or damaged"
        return state, Notice(f"{text}: the adapter is that of the last step", "warning")

    def _checkpoints(self) -> list[Path]:
        self.settle()
        return checkpoint.numbered(self._run.checkpoints)

    def _best_words(self) -> str:
        return f"{self.best.loss:.4f} after step {self.best.step}"

    def _changed_files(self) -> Iterator[Notice]:
        for path in sources.changed(self._sources):
            if path not in self._told:
                self._told.add(path)
                yield Notice(
                    f"{path} has changed since it was read; this run goes on with what was read, "
                    "and cannot be resumed unless the file is as it was",
                    "warning",
                )
