"""`telemetry.jsonl`: one flushed line per event, appended, never rewritten.

A line is `{"event": ..., "time": ..., <the event's own fields>}`; `time` is seconds since the epoch
(UTC). A number that is not finite is written as null, which JSON has, instead of NaN, which it
has not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vox_core import files
from vox_core.contract import Event, StepDone
from vox_core.errors import StorageError


def as_line(event: Event, now: float) -> dict[str, Any]:
    """The event as the flat object that is written."""
    fields = {key: _json_number(value) for key, value in asdict(event).items()}
    if isinstance(event, StepDone):
        if event.startup_seconds is None:
            del fields["startup_seconds"]
        fields["tokens_per_second"] = round(event.tokens / max(event.seconds, 1e-9), 1)
    return {"event": event.name, "time": round(now, 3), **fields}


class Telemetry:
    """Appends events to a file. A line that a crash tore is cut off before the first append."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mended = False
        self._waiting = bytearray()

    def __call__(self, event: Event) -> None:
        line = json.dumps(as_line(event, time.time()), ensure_ascii=False) + "\n"
        self._waiting += line.encode()
        with files.storage_errors(self._path):
            if not self._mended:
                _mend(self._path)
                self._mended = True
        try:
            files.append(self._path, bytes(self._waiting))
            self._waiting.clear()
        except StorageError as error:
            # A full disk ends no run; what it would not take is written with a later event.
            if error.code != "VOX-S001":
                raise


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, a torn last line left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def _mend(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("rb+") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
