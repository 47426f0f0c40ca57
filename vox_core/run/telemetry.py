"""`telemetry.jsonl`: the log of a run, one flushed JSON line per event, never rewritten.

    {"event": "step", "time": 1763793255.1, "step": 1, "loss": 2.31, …}

`time` is seconds since the epoch (UTC). A float that is not finite is null; a field that is None is
left out. A `Notice` is called `warning` or `notice` by its level, which is not written. A backend
may emit events of its own, with whatever fields they like. The fields of vox's own events follow
from their dataclasses, for the writer, the reader and docs/reference/telemetry.schema.json alike.

`Telemetry` writes. A crash leaves at most one torn line at the end, which the next process cuts
off. A disk that fills up does not end a run: lines wait, and are written when there is room.

`Tail` reads, while a run writes or afterwards. A line that is no JSON or does not fit its event is
skipped and counted. It is a log only: what a resume needs is in the checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from vox_core import files
from vox_core.contract import Event, Notice, StepDone
from vox_core.errors import AdapterError, StorageError

LATEST = 2.5e11
"""Seconds since the epoch: the year 9892, before the calendar ends."""
WARNING = "warning"
TOKENS_PER_SECOND = "tokens_per_second"

_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_IN_JSON: dict[object, Any] = {
    int: _Count,
    int | None: _Count | None,
    float: float | None,  # null: not a finite number
    tuple[str, ...]: list[str],
    Mapping[str, int]: dict[str, _Count],
    Mapping[str, float]: dict[str, float | None],
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
    """Line -> event; None for a name that vox does not have. ValueError if a field is wrong."""
    name = line.get("event")
    kind = kinds().get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    given, hints = dict(models()[str(name)].model_validate(line)), get_type_hints(kind)
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
    made = dict[str, type[BaseModel]]()
    for name, kind in kinds().items():
        hints, given = get_type_hints(kind), dict[str, Any]()
        for field in fields(kind):
            if (kind, field.name) != (Notice, "level"):
                hint = hints[field.name]
                default = ... if field.default is MISSING else field.default
                given[field.name] = (_IN_JSON.get(hint, hint), default)
        made[name] = create_model(name, __config__=ConfigDict(strict=True), **given)
    return made


def finite(value: Any) -> Any:
    """The value; None for a float that is not finite, as JSON has it."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- writing ----------------------------------------------------------------------------------


class Telemetry:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, list[bytes]()
        self._begun = self._failing = False

    def __call__(self, event: Event) -> list[Notice]:
        """Append a line. The first one has to be written (StorageError); of later ones that cannot
        be, one warning is returned."""
        line = json.dumps(line_of(event, time.time()), ensure_ascii=False)
        # A surrogate, as in the name of a file that is not UTF-8, has no bytes of its own.
        self._waiting.append(line.encode("utf-8", "backslashreplace") + b"\n")
        try:
            if not self._begun:
                with files.storage_errors(self._path):
                    _cut_torn_line(self._path)
            files.append(self._path, b"".join(self._waiting))
        except StorageError as error:
            if not self._begun:
                raise
            failing, self._failing = self._failing, True
            text = f"{self._path.name} cannot be written, and waits: {error.found}"
            return [] if failing else [Notice(text, "warning")]
        self._waiting.clear()
        self._begun, self._failing = True, False
        return []


def _cut_torn_line(path: Path) -> None:
    """Cut off what a crash left after the last line end."""
    if path.exists():
        content = path.read_bytes()
        if len(content) > (end := content.rfind(b"\n") + 1):
            os.truncate(path, end)


# --- reading ----------------------------------------------------------------------------------


class Line(NamedTuple):
    """Time and event of a line: seconds since the epoch, 0 if unknown; a bare `Event` if it is
    none of vox's."""

    time: float
    event: Event


class Tail:
    """Reads a file from its beginning on, and then what was added. `skipped` counts bad lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self.skipped = path, 0, 0

    def new(self) -> Iterator[Line]:
        """Whole lines since the last call; none while there is no file, A001 if it is another thing
        or cannot be read."""
        try:
            if not self._path.exists():
                return
            if not self._path.is_file():  # reading a pipe or a device would never end
                raise OSError(0, "something that is no file")
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at = 0
                file.seek(self._at)
                for piece in file:
                    if not piece.endswith(b"\n"):
                        return
                    self._at += len(piece)
                    if line := _parsed(piece):
                        yield line
                    elif piece.strip():
                        self.skipped += 1
        except OSError as error:
            raise AdapterError(
                "A001",
                "the telemetry of a run cannot be read",
                where=self._path,
                found=error.strerror or error,
                expected="the telemetry.jsonl that `vox train` writes",
                remedy="name a run folder; they lie under runs/ unless --out said otherwise",
            ) from error


def _parsed(piece: bytes) -> Line | None:
    try:
        line = json.loads(piece)
        if not isinstance(line, dict) or not isinstance(line.get("event"), str):
            return None
        event = event_of(line) or Event()
    except (ValueError, RecursionError):
        return None
    time = line.get("time")
    known = isinstance(time, int | float) and 0 <= time < LATEST
    return Line(float(time) if known else 0.0, event)  # type: ignore[arg-type]
