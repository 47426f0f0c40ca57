"""TensorBoard for vox: write the curves of each run as event files in `RUN/tensorboard`.

    tensorboard --logdir runs

vox runs this plugin in its own process and sends it one event after another. The plugin turns the
numbers of each into scalars, and writes them with the package `tensorboard`, without TensorFlow and
without torch. To write for another tracker, replace `Curves`; most take what `scalars` returns.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path

from vox_core.contract import (
    CheckpointWritten,
    Evaluation,
    Event,
    ObjectiveMetrics,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)
from vox_core.hookspecs import hookimpl

FOLDER = "tensorboard"
"""In the run folder."""
_Drawn = StepDone | ObjectiveMetrics | Validation | Evaluation | CheckpointWritten


class Curves:
    """The event file from the start or resume of a run until `close`, by TensorBoard's own writer.

    A resumed run gets a new file that states its first step; TensorBoard then discards later steps
    of the earlier files.
    """

    def __init__(self, start: RunStart) -> None:
        _without_tensorflow()
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(Path(start.run) / FOLDER))
        if start.first_step > 1:
            log = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=start.first_step, session_log=log)
            self._writer.add_event(event)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars of a step."""
        told = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        summary = self._summary(value=told)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Write the rest, and stop the writer's thread."""
        self._writer.close()


def _without_tensorflow() -> None:
    """Make tensorboard write files by itself even if TensorFlow is installed, whose import takes
    seconds and hundreds of megabytes; tensorboard checks for this module."""
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))


class TensorBoard:
    """The tracker; it writes one run after another."""

    def __init__(self) -> None:
        self._start: RunStart | None = None
        self._curves: Curves | None = None

    @hookimpl
    def vox_event(self, event: Event) -> None:
        """Write the numbers of an event, flushed to disk."""
        if isinstance(event, RunStart):
            self._close()
            self._start = event
        elif values := scalars(event):
            assert isinstance(event, _Drawn)
            self._opened().add(event.step, values)
        if isinstance(event, RunEnd):
            self._close()
            self._start = None

    def _opened(self) -> Curves:
        """Create the writer at the first number, so that a refused run leaves no folder."""
        assert self._start, "a number before the run"
        if self._curves is None:
            self._curves = Curves(self._start)
        return self._curves

    def _close(self) -> None:
        if self._curves is not None:
            self._curves.close()
        self._curves = None


def scalars(event: Event) -> dict[str, float]:
    """Return tag -> value; empty for an event without numbers to draw."""
    match event:
        case StepDone():
            return _of_step(event)
        case ObjectiveMetrics(metrics=metrics):
            return {f"train/{name}": value for name, value in metrics.items()}
        case Validation(loss=loss, reward=reward):
            return {"validation/loss": loss} if reward is None else {"validation/reward": reward}
        case Evaluation(scores=scores):
            return dict(scores)
        case CheckpointWritten(seconds=seconds):
            return {"checkpoint/seconds": seconds}
    return {}


def _of_step(step: StepDone) -> dict[str, float]:
    values = {
        "train/loss": step.loss,
        "train/learning_rate": step.lr,
        "train/gradient_norm": step.grad_norm,
        "train/trained_tokens": step.trained_tokens,
        "train/tokens_per_second": step.tokens / max(step.seconds, 1e-9),
    }
    if step.memory is not None:
        values["train/memory_bytes"] = step.memory
    return values


observer = TensorBoard()
