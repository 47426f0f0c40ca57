"""When a checkpoint is due, and the thread that writes it.

The training thread copies the state and goes on; one thread writes, and there is at most one
checkpoint under way: the next one waits for it. Its outcome is announced on the training thread, at
the next step, after it has been written, flushed and read back and older ones have been pruned.

A whole model's state (method `full`) is not copied: the training thread writes it itself, tensor by
tensor, because a backend need not let another thread read it.

A disk that is full or broken costs a checkpoint and not the run: a warning says so, and the next
one tries again. The last checkpoint of a run is written while the run waits, and has to succeed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from vox_core.contract import CheckpointWritten, Event, Notice, TrainState
from vox_core.errors import StorageError, TrainingError, command
from vox_core.run import checkpoint
from vox_core.run.checkpoint import Origin, Retention
from vox_core.run.folder import numbered
from vox_core.run.progress import Progress

LOWER_RATE = ("--allow-change", "lr", "--lr", "LOWER")
_Written: TypeAlias = tuple[Path, float, str | None]


@dataclass(frozen=True, slots=True)
class Due:
    """When to save, beside the end: every so many steps or minutes, after an epoch's last step.

    Args:
        epoch_of: passes over the data after a step, as a fraction.
    """

    steps: int = 0
    minutes: float = 0.0
    epochs: bool = False
    epoch_of: Callable[[int], float] = lambda _step: 0.0

    def at(self, step: int, seconds: float) -> bool:
        """Whether to save after `step`, so many seconds after the last time."""
        return (
            bool(self.steps and step % self.steps == 0)
            or bool(self.minutes and seconds >= 60 * self.minutes)
            or (self.epochs and int(self.epoch_of(step)) > int(self.epoch_of(step - 1)))
        )


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A checkpoint that the thread writes.

    Args:
        asked: when the training thread began to copy the state.
        held: seconds that this took.
        work: the folder, when it was there, and a warning.
    """

    step: int
    asked: float
    held: float
    work: Future[_Written]


class CheckpointWriter:
    """The checkpoints of one run in one process. Its methods are the training thread's.

    Args:
        parent: the folder for them.
        emit: receives the outcome of each.
        origin: of the run; its `elapsed` is what went before this process.
        progress: losses and validations so far; the step of the best one is saved and kept.
    """

    def __init__(
        self,
        parent: Path,
        emit: Callable[[Event], None],
        *,
        origin: Origin | None = None,
        due: Due | None = None,
        retention: Retention | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._parent, self._emit = parent, emit
        self._origin, self._due = origin or Origin(), due or Due()
        self._retention = retention or Retention()
        self._began = self._saved = time.monotonic()
        self._asked: float | None = None
        self._pool = ThreadPoolExecutor(1, "vox-checkpoint")
        self._under_way: _UnderWay | None = None
        self._announced: int | None = None
        self._good = next(iter(numbered(parent)), None)
        self._progress = progress or Progress()
        self._kept_best = self._progress.best_step

    def due(self, step: int) -> bool:
        """Whether to save after `step`. Announces the one before, too, if it is there by now."""
        self.poll()
        now = time.monotonic()
        if not (self._due.at(step, now - self._saved) or step == self._progress.best_step):
            return False
        self._asked = now
        return True

    def submit(self, state: TrainState, *, last: bool = False) -> None:
        """Have `state` written: a copy of it, so that training may go on; the `last`, and a whole
        model's, as it is."""
        asked = self._asked or time.monotonic()
        _require_finite(state, self._parent)
        self.settle()
        self._saved, self._asked = time.monotonic(), None
        origin, best = self._origin_at(state.step), self._progress.best_step
        if state.adapter.method == "full":
            work = Future[_Written]()
            try:
                work.set_result(self._write(state, origin, best))
            except StorageError as error:
                work.set_exception(error)
        else:
            owned = state if last else state.copy()
            work = self._pool.submit(self._write, owned, origin, best)
        self._under_way = _UnderWay(state.step, asked, time.monotonic() - asked, work)

    def poll(self) -> None:
        """Announce the checkpoint under way, if it is done."""
        if self._under_way and self._under_way.work.done():
            self.settle()

    def settle(self, *, last: bool = False) -> None:
        """Wait for the checkpoint under way, and announce its outcome.

        Args:
            last: it has to succeed; otherwise a warning says that it could not be written.
        """
        if (done := self._under_way) is None:
            return
        self._under_way = None
        try:
            path, at, warning = done.work.result()
        except StorageError as error:
            if last:
                what = f"the last checkpoint could not be written: {error.what}"
                raise error.but(what=what, faults=[self._last_good()]) from error
            text = f"the checkpoint after step {done.step} could not be written: {error.what}"
            text = f"{text} ({error.found}); training goes on, and {self._last_good()}"
            self._emit(Notice(text, "warning"))
            return
        self._announced, self._good = done.step, path
        seconds, held = round(at - done.asked, 4), round(done.held, 4)
        self._emit(CheckpointWritten(done.step, str(path), seconds, held))
        if warning:
            self._emit(Notice(warning, "warning"))

    def finish(self, state: TrainState) -> None:
        """Write the last checkpoint of the run, and wait for it. If it cannot be written, the
        StorageError names the last good one."""
        self.settle()
        if self._announced != state.step:
            self.submit(state, last=True)
            self.settle(last=True)

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and end the thread."""
        try:
            self.settle()
        finally:
            self._pool.shutdown()

    def _write(self, state: TrainState, origin: Origin, best: int | None) -> _Written:
        path = checkpoint.save(self._parent, state, origin)
        if best is not None and (self._parent / f"step-{best}").is_dir():
            self._kept_best = best  # else the disk was full for it, and the one before stays
        try:
            checkpoint.prune(self._parent, self._retention, self._kept_best)
        except StorageError as error:
            warning = f"an older checkpoint could not be removed: {error.what} ({error.found})"
            return path, time.monotonic(), warning
        return path, time.monotonic(), None

    def _origin_at(self, step: int) -> Origin:
        elapsed = round(self._origin.elapsed + time.monotonic() - self._began, 3)
        now = {"epoch": self._due.epoch_of(step), "elapsed": elapsed, **self._progress.saved()}
        return self._origin.model_copy(update=now)

    def _last_good(self) -> str:
        return f"the last good one is {self._good}" if self._good else "there is none yet"


def _require_finite(state: TrainState, checkpoints: Path) -> None:
    """Refuse to keep NaN or infinite values (T001)."""
    import numpy as np

    bad = [name for name, value in state.adapter.tensors().items() if not np.isfinite(value).all()]
    if bad:
        raise TrainingError(
            "T001",
            "the trained weights are not finite",
            where=checkpoints,
            found=f"after step {state.step}: {bad[0]}, and {len(bad) - 1} more tensors",
            remedy="go on from the checkpoint before it: "
            + command("vox", "train", "--resume", checkpoints.parent, *LOWER_RATE),
        )
