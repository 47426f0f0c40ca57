"""`telemetry.jsonl`: one flushed line per event, appended, never rewritten.

What a line looks like is in wire.py, how lines are read in lines.py. A line is on the file whole or
not at all: a crash leaves at most one torn line at the end, which the next process that appends
cuts off; a write that fails halfway is taken back.

A disk that is full later on does not end a run: lines wait, and are written when there is room.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vox_core.contract import Event, Notice
from vox_core.files import storage_error
from vox_core.run.lines import Lines
from vox_core.run.wire import line_of

WAITING = 10_000
"""Lines that may wait for room; the oldest go first."""
_BLOCK = 1 << 16


class Telemetry:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun = self._told = False
        self._waiting: deque[bytes] = deque(maxlen=WAITING)
        self._lost = 0

    def __call__(self, event: Event) -> list[str]:
        """Append a line.

        Returns:
            What has gone wrong for the first time, in words.

        Raises:
            StorageError: not even the first line could be written.
        """
        self._keep(event)
        try:
            if not self._begun:
                _mend(self._path)
            _append(self._path, b"".join(self._waiting))
        except OSError as error:
            return self._failed(error)
        self._waiting.clear()
        self._begun, self._told = True, False
        if self._lost:
            lost, self._lost = self._lost, 0
            return self(Notice(f"{lost} lines of telemetry were lost to a full disk", "warning"))
        return []

    def _keep(self, event: Event) -> None:
        self._lost += len(self._waiting) == WAITING
        line = json.dumps(line_of(event, time.time()), ensure_ascii=False)
        # A surrogate, as in the name of a file that is not UTF-8, has no bytes of its own.
        self._waiting.append(line.encode("utf-8", "backslashreplace") + b"\n")

    def _failed(self, error: OSError) -> list[str]:
        if not self._begun:
            raise storage_error(error, self._path) from error
        told, self._told = self._told, True
        why = error.strerror or error
        return [] if told else [f"{self._path.name} cannot be written, and waits: {why}"]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that are in order, a torn last one left out.

    Raises:
        AdapterError: A001, it is no file, or cannot be read.
    """
    for told in Lines(path).new():
        yield told.line


def _append(path: Path, data: bytes) -> None:
    """All of `data`, or nothing."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        before = os.fstat(file).st_size
        try:
            _write(file, data)
        except OSError:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def _write(file: int, data: bytes) -> None:
    while data:
        if not (written := os.write(file, data)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data = data[written:]


def _mend(path: Path) -> None:
    """Cut off what a crash left after the last line end."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start = end
        while start:
            start = max(start - _BLOCK, 0)
            file.seek(start)
            if (found := file.read(min(_BLOCK, end - start)).rfind(b"\n")) >= 0:
                start += found + 1
                break
        if start < end:
            file.truncate(start)
