"""Reading `telemetry.jsonl` while it is written, whoever wrote it.

Lines come whole or not at all: what has no line end yet is left for the next look. A line that is
too long, is no JSON, or is not what its event looks like is passed over and counted. Nothing here
writes, and nothing that a line says becomes a path.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from vox_core.contract import Event
from vox_core.errors import AdapterError
from vox_core.run.wire import event_of

LONGEST = 1 << 20
"""Bytes of a line. One of vox's own has a few hundred."""

LATEST = 2.5e11
"""Seconds since the epoch: the year 9892, before the calendar ends."""


class Told(NamedTuple):
    """A line, the event that it tells of, and when: seconds since the epoch, 0 if unknown."""

    time: float
    event: Event
    line: dict[str, Any]


class Lines:
    """A file of telemetry, from its beginning on. `passed_over` lines were of no use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._within = False  # a line that is too long, and has not ended yet
        self.passed_over = 0

    def new(self) -> Iterator[Told]:
        """What has come since the last call; nothing while there is no file.

        Raises:
            AdapterError: A001, it is no file, or cannot be read.
        """
        try:
            if (file := _opened(self._path)) is None:
                return
            with file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at, self._within = 0, False
                file.seek(self._at)
                yield from self._read(file)
        except OSError as error:
            raise _unreadable(self._path, error.strerror or error) from error

    def _read(self, file: IO[bytes]) -> Iterator[Told]:
        while piece := file.readline(LONGEST):
            ended, within = piece.endswith(b"\n"), self._within
            if not ended and len(piece) < LONGEST:  # the end of the file
                self._at += len(piece) if within else 0
                return
            self._at += len(piece)
            self._within = not ended
            if ended and not within and (told := _told(piece)):
                yield told
            elif ended and (within or piece.strip()):
                self.passed_over += 1


def _opened(path: Path) -> IO[bytes] | None:
    """The file, if it is one: a pipe or a device in its place would never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _unreadable(path, "something that is no file")
    return os.fdopen(descriptor, "rb")


def _told(piece: bytes) -> Told | None:
    try:
        line = json.loads(piece)
        if not isinstance(line, dict) or not isinstance(line.get("event"), str):
            return None
        event = event_of(line)
    except (ValueError, RecursionError):
        return None
    time = line.get("time")
    known = isinstance(time, int | float) and 0 <= time < LATEST
    return Told(float(time) if known else 0.0, event or Event(), line)  # type: ignore[arg-type]


def _unreadable(path: Path, found: object) -> AdapterError:
    return AdapterError(
        "A001",
        "the telemetry of a run cannot be read",
        where=path,
        found=found,
        expected="the telemetry.jsonl that `vox train` writes",
        remedy="name a run folder; they lie under runs/ unless --out said otherwise",
    )
