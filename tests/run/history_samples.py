"""Run folders written by hand: telemetry from events, a plan, checkpoints, a lock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vox_core.contract import Event, RunEnd, RunStart, StepDone, Validation
from vox_core.run.folder import RunFolder, locked
from vox_core.run.telemetry import line_of


def start(total: int = 4, first: int = 1, model: str = "m") -> RunStart:
    return RunStart("r", model, "cpu", "a CPU", "fp32", "0" * 64, first, total, 8, 99, 40)


def step(number: int, loss: float, memory: int = 5) -> StepDone:
    return StepDone(number, loss, 1e-4, 1.0, 100, 40, 0.5, memory=memory)


def whole(losses: Iterable[float] = (4.0, 3.0, 2.0, 1.0), held_out: float = 1.5) -> list[Event]:
    """A run that is done, with validation."""
    taken = [step(number, loss) for number, loss in enumerate(losses, start=1)]
    last = len(taken)
    end = [Validation(last, held_out), RunEnd(last, "done", 2.0)]
    return [start(last), Validation(0, 5.0), *taken, *end]


def text_of(events: Iterable[Event], began: float = 1000.0) -> str:
    """The lines of events that came one second after another."""
    return "".join(json.dumps(line_of(event, began + at)) + "\n" for at, event in enumerate(events))


def make_run(folder: Path, events: Iterable[Event], contract: object = None, **more: Any) -> Path:
    """A run folder; `more` goes to `text_of`."""
    folder.mkdir(parents=True)
    (folder / "telemetry.jsonl").write_text(text_of(events, **more))
    (folder / "plan.json").write_text(json.dumps({"contract": contract or {}}))
    return folder


@contextmanager
def worked_in(folder: Path) -> Iterator[None]:
    """As if a process trained there."""
    with locked(RunFolder(folder)):
        yield
