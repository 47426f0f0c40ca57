"""When a checkpoint is due, and the thread that writes it.

The training thread copies the state and goes on; one thread writes, and there is at most one
checkpoint under way: the next one waits for it. What became of it, well or ill, is said on the
training thread, at the next step: a checkpoint is announced when it has been written, flushed and
read back, and the older ones are pruned only then.

A disk that is full or broken costs a checkpoint and not the run: a warning says so, and the next
one tries again. The last checkpoint of a run is written while the run waits, and has to succeed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core.contract import CheckpointWritten, Event, Notice, TrainState
from vox_core.errors import StorageError
from vox_core.run import checkpoint
from vox_core.run.checkpoint import Origin, Retention
from vox_core.run.nonfinite import require_finite
from vox_core.run.progress import Progress

if TYPE_CHECKING:
    from vox_core.contract import Floats


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


class CheckpointWriter:
    """The checkpoints of one run in one process. Its methods are the training thread's.

    Args:
        parent: the folder for them.
        emit: told what became of each.
        origin: what they say of the run; its `elapsed` is what went before this process.
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
        self._good = next(iter(checkpoint.numbered(parent)), None)
        self._progress = progress or Progress()
        self._kept_best = self._progress.best_step

    def due(self, step: int) -> bool:
        """Whether to save after `step`. Says what became of the one before, too."""
        self.poll()
        now = time.monotonic()
        if not (self._due.at(step, now - self._saved) or step == self._progress.best_step):
            return False
        self._asked = now
        return True

    def submit(self, state: TrainState) -> None:
        """Have `state` written: a copy of it, so that training may go on."""
        asked = self._asked or time.monotonic()
        require_finite(state, self._parent)
        self.settle()
        self._saved, self._asked = time.monotonic(), None
        owned, origin, best = _copied(state), self._origin_at(state.step), self._progress.best_step
        held = time.monotonic() - asked
        work = self._pool.submit(self._write, owned, origin, best)
        self._under_way = _UnderWay(state.step, asked, held, work)

    def poll(self) -> None:
        """Say what became of the checkpoint under way, if that is known by now."""
        if self._under_way and self._under_way.work.done():
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint under way, and say what became of it."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        try:
            written = under_way.work.result()
        except StorageError as error:
            self._emit(self._missed(under_way.step, error))
            return
        self._announce(under_way.step, written, written.at - under_way.asked, under_way.held)

    def finish(self, state: TrainState) -> None:
        """Write the last checkpoint of the run, and wait for it.

        Raises:
            StorageError: it could not be written; the words name the last good one.
        """
        self.settle()
        if self._announced == state.step:
            return
        require_finite(state, self._parent)
        began = time.monotonic()
        try:
            origin, best = self._origin_at(state.step), self._progress.best_step
            written = self._pool.submit(self._write, state, origin, best).result()
        except StorageError as error:
            raise self._without_the_last(error) from error
        self._announce(state.step, written, written.at - began, written.at - began)

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and end the thread."""
        try:
            self.settle()
        finally:
            self._pool.shutdown()

    def _announce(self, step: int, written: _Written, seconds: float, held: float) -> None:
        self._announced, self._good = step, written.path
        self._emit(CheckpointWritten(step, str(written.path), round(seconds, 4), round(held, 4)))
        if written.warning:
            self._emit(Notice(written.warning, "warning"))

    def _write(self, state: TrainState, origin: Origin, best: int | None) -> _Written:
        path = checkpoint.save(self._parent, state, origin)
        warning = None
        try:
            checkpoint.prune(self._parent, self._retention, self._best_there(best))
        except StorageError as error:
            warning = f"an older checkpoint could not be removed: {error.what} ({error.found})"
        return _Written(path, time.monotonic(), warning)

    def _best_there(self, best: int | None) -> int | None:
        """The best step that is on the disk, which may have been full for a better one."""
        if best is not None and (self._parent / f"step-{best}").is_dir():
            self._kept_best = best
        return self._kept_best

    def _origin_at(self, step: int) -> Origin:
        losses, validations = self._progress.saved()
        return replace(
            self._origin,
            epoch=self._due.epoch_of(step),
            elapsed=round(self._origin.elapsed + time.monotonic() - self._began, 3),
            losses=losses,
            validations=validations,
        )

    def _missed(self, step: int, error: StorageError) -> Notice:
        return Notice(
            f"the checkpoint after step {step} could not be written: {error.what} "
            f"({error.found}); training goes on, and {self._last_good()}",
            "warning",
        )

    def _without_the_last(self, error: StorageError) -> StorageError:
        return StorageError(
            error.code.removeprefix("VOX-"),
            f"the last checkpoint could not be written: {error.what}",
            where=error.where,
            found=error.found,
            faults=[self._last_good()],
            remedy=error.remedy,
        )

    def _last_good(self) -> str:
        return f"the last good one is {self._good}" if self._good else "there is none yet"


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """`asked`: when the training thread began to copy it; `held`: seconds that this took."""

    step: int
    asked: float
    held: float
    work: Future[_Written]


@dataclass(frozen=True, slots=True)
class _Written:
    path: Path
    at: float
    warning: str | None


def _copied(state: TrainState) -> TrainState:
    def copy(array: Floats) -> Floats:
        return array.copy()

    adapter = state.adapter
    return TrainState(
        state.step,
        adapter.with_tensors({name: copy(value) for name, value in adapter.tensors().items()}),
        {name: (copy(m), copy(v)) for name, (m, v) in state.moments.items()},
        state.skipped,
    )
