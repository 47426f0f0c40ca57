"""TensorBoard for vox: write the curves of each run as event files in `RUN/tensorboard`.

    tensorboard --logdir runs

vox runs this plugin in its own process and sends it one event after another. `Curves` writes their
numbers with the package `tensorboard`, without TensorFlow and without torch.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path

from vox_core.api.tracking import Tracker
from vox_core.contract import Outcome, RunStart

FOLDER = "tensorboard"
"""In the run folder."""


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

    def close(self, outcome: Outcome) -> None:
        """Write the rest, and stop the writer's thread."""
        self._writer.close()


def _without_tensorflow() -> None:
    """Make tensorboard write files by itself even if TensorFlow is installed, whose import takes
    seconds and hundreds of megabytes; tensorboard checks for this module."""
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))


observer = Tracker(Curves)
