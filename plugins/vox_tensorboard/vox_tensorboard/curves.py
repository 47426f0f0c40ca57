"""One event file, written by TensorBoard's own writer.

A run that is gone on with gets a file of its own, which says from which step on it holds: what
TensorBoard read of those steps before is then forgotten.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path

from vox_core.contract import RunStart

FOLDER = "tensorboard"
"""In the run folder."""


class Curves:
    """From the start of a run, or of its resume, until `close`."""

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
        """Write the rest, and end the writer's thread."""
        self._writer.close()


def _without_tensorflow() -> None:
    """Have tensorboard write files by itself though TensorFlow is installed: importing that takes
    seconds and hundreds of megabytes. This is the module it looks for."""
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
