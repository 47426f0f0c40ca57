"""`telemetry.jsonl`: the log of a run, one flushed JSON line per event, never rewritten.

    {"event": "step", "time": 1763793255.1, "step": 1, "loss": 2.31, …}

`time` is seconds since the epoch (UTC). A float that is not finite is null; a field that is None is
left out. A `Notice` is called `warning` or `notice` by its level, which is not written. A backend
may emit events of its own, with whatever fields they like. The fields of vox's own events follow
from their dataclasses, for the writer, the reader and docs/reference/telemetry.schema.json alike.

`Telemetry` writes. A crash leaves at most one torn line at the end, which the next process cuts
off. A disk that fills up does not end a run: lines wait, and are written when there is room.

`Tail` reads, while a run writes or afterwards. A line that is too long, is no JSON or does not fit
its event is skipped and counted. Nothing that a line says becomes a path.

A log only: what a resume needs is in the checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from vox_core import files
from vox_core.contract import Event, Notice, StepDone
from vox_core.errors import AdapterError, StorageError

WAITING = 10_000
"""Lines that may wait for room; the oldest go first."""
LONGEST = 1 << 20
"""Bytes of a line. One of vox's own has a few hundred."""
LATEST = 2.5e11
"""Seconds since the epoch: the year 9892, before the calendar ends."""
WARNING = "warning"
TOKENS_PER_SECOND = "tokens_per_second"
_BLOCK = 1 << 16

_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_IN_JSON: dict[object, Any] = {
    int: _Count,
    int | None: _Count | None,
    float: float | None,  # null: not a finite number
    tuple[str, ...]: list[str],
    Mapping[str, int]: dict[str, _Count],
}


# --- events and lines -------------------------------------------------------------------------


def line_of(event: Event, now: float) -> dict[str, Any]:
    """Event -> the flat object that is written."""
    given = {key: finite(value) for key, value in asdict(event).items() if value is not None}
    if isinstance(event, Notice):
        del given["level"]
    if isinstance(event, StepDone):
        given[TOKENS_PER_SECOND] = round(event.tokens / max(event.seconds, 1e-9), 1)
    warning = isinstance(event, Notice) and event.level == "warning"
    return {"event": WARNING if warning else event.name, "time": round(now, 3), **given}


def event_of(line: Mapping[str, Any]) -> Event | None:
    """Line -> event; None for a name that vox does not have.

    Raises:
        ValueError: a field is missing, or of the wrong type.
    """
    name = line.get("event")
    kind = kinds().get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    read = models()[str(name)].model_validate(line)
    hints = get_type_hints(kind)
    given = {key: getattr(read, key) for key in type(read).model_fields}
    given |= {key: math.nan for key in given if given[key] is None and hints[key] is float}
    return kind(**given, **({"level": "warning"} if name == WARNING else {}))


@cache
def kinds() -> dict[str, type[Event]]:
    """Name on a line -> event; those of `vox_core.contract` alone."""
    ours = [kind for kind in Event.__subclasses__() if kind.__module__ == Event.__module__]
    return {**{kind.name: kind for kind in ours}, WARNING: Notice}


@cache
def models() -> dict[str, type[BaseModel]]:
    """Name on a line -> the fields of such a line."""
    return {name: _model(name, kind) for name, kind in kinds().items()}


def _model(name: str, kind: type[Event]) -> type[BaseModel]:
    hints = get_type_hints(kind)
    taken: dict[str, Any] = {
        field.name: (
            _IN_JSON.get(hints[field.name], hints[field.name]),
            ... if field.default is MISSING else field.default,
        )
        for field in fields(kind)
        if (kind, field.name) != (Notice, "level")
    }
    return create_model(name, __config__=ConfigDict(strict=True), **taken)


def finite(value: Any) -> Any:
    """The value; None for a float that is not finite, as JSON has it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- writing ----------------------------------------------------------------------------------


class Telemetry:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun = self._failing = False
        self._waiting: deque[bytes] = deque(maxlen=WAITING)
        self._lost = 0

    def __call__(self, event: Event) -> list[Notice]:
        """Append a line.

        Returns:
            A warning, the first time that a line cannot be written.

        Raises:
            StorageError: not even the first line could be written.
        """
        self._keep(event)
        try:
            if not self._begun:
                with files.storage_errors(self._path):
                    _cut_torn_line(self._path)
            files.append(self._path, b"".join(self._waiting))
        except StorageError as error:
            return self._failed(error)
        self._waiting.clear()
        self._begun, self._failing = True, False
        if self._lost:
            lost, self._lost = self._lost, 0
            return self(Notice(f"{lost} lines of telemetry were lost to a full disk", "warning"))
        return []

    def _keep(self, event: Event) -> None:
        self._lost += len(self._waiting) == WAITING
        line = json.dumps(line_of(event, time.time()), ensure_ascii=False)
        # A surrogate, as in the name of a file that is not UTF-8, has no bytes of its own.
        self._waiting.append(line.encode("utf-8", "backslashreplace") + b"\n")

    def _failed(self, error: StorageError) -> list[Notice]:
        if not self._begun:
            raise error
        failing, self._failing = self._failing, True
        text = f"{self._path.name} cannot be written, and waits: {error.found}"
        return [] if failing else [Notice(text, "warning")]


def _cut_torn_line(path: Path) -> None:
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


# --- reading ----------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line, its event, and its time: seconds since the epoch, 0 if unknown."""

    time: float
    event: Event
    line: dict[str, Any]


class Tail:
    """Reads a file from its beginning on, and then what was added. `skipped` counts bad lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._within = False  # a line that is too long, and has not ended yet
        self.skipped = 0

    def new(self) -> Iterator[Line]:
        """Whole lines since the last call; nothing while there is no file.

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

    def _read(self, file: IO[bytes]) -> Iterator[Line]:
        while piece := file.readline(LONGEST):
            ended, within = piece.endswith(b"\n"), self._within
            if not ended and len(piece) < LONGEST:  # the end of the file
                self._at += len(piece) if within else 0
                return
            self._at += len(piece)
            self._within = not ended
            if ended and not within and (line := _parsed(piece)):
                yield line
            elif ended and (within or piece.strip()):
                self.skipped += 1


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The good lines of a file, without a torn last one.

    Raises:
        AdapterError: A001, it is no file, or cannot be read.
    """
    for each in Tail(path).new():
        yield each.line


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


def _parsed(piece: bytes) -> Line | None:
    try:
        line = json.loads(piece)
        if not isinstance(line, dict) or not isinstance(line.get("event"), str):
            return None
        event = event_of(line)
    except (ValueError, RecursionError):
        return None
    time = line.get("time")
    known = isinstance(time, int | float) and 0 <= time < LATEST
    return Line(float(time) if known else 0.0, event or Event(), line)  # type: ignore[arg-type]


def _unreadable(path: Path, found: object) -> AdapterError:
    return AdapterError(
        "A001",
        "the telemetry of a run cannot be read",
        where=path,
        found=found,
        expected="the telemetry.jsonl that `vox train` writes",
        remedy="name a run folder; they lie under runs/ unless --out said otherwise",
    )
