"""`telemetry.jsonl`: one flushed line per event, appended, never rewritten.

What a line looks like is in wire.py, how lines are read in lines.py. A line is on the file whole or
not at all: a crash leaves at most one torn line at the end, which the next process that appends
cuts off; a write that fails halfway is taken back.

A disk that is full later on does not end a run: lines wait, and are written when there is room.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vox_core import files
from vox_core.contract import Event, Notice
from vox_core.errors import StorageError
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
                with files.storage_errors(self._path):
                    _mend(self._path)
            files.append(self._path, b"".join(self._waiting))
        except StorageError as error:
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

    def _failed(self, error: StorageError) -> list[str]:
        if not self._begun:
            raise error
        told, self._told = self._told, True
        return [] if told else [f"{self._path.name} cannot be written, and waits: {error.found}"]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that are in order, a torn last one left out.

    Raises:
        AdapterError: A001, it is no file, or cannot be read.
    """
    for told in Lines(path).new():
        yield told.line


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
