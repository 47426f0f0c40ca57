"""Runs that stop and go on, held against the run that did not: what a test of resuming needs.

`cut_after` raises out of the middle of a run, as a killed process would leave it: with nothing
written but what was on the disk already. `stop_after` is the polite way, a first SIGTERM.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.run.lines import read
from vox_core.config import TrainSettings, validate
from vox_core.contract import Event, StepDone, Validation
from vox_core.run.artifacts import TrainReport
from vox_core.run.train import train

ADAPTER = "adapter_model.safetensors"


class Killed(BaseException):
    """The process is gone; nothing in vox catches it."""


def cut_after(step: int, event: type[Event] = StepDone) -> Callable[[Event], None]:
    """Killed when this is told."""

    def observe(told: Event) -> None:
        if isinstance(told, event) and told.step == step:  # type: ignore[attr-defined]
            raise Killed

    return observe


def stop_after(step: int) -> Callable[[Event], None]:
    """SIGTERM while `step` is told: the run ends after it."""

    def observe(told: Event) -> None:
        if isinstance(told, StepDone) and told.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return observe


def killed(settings: TrainSettings, observe: Callable[[Event], None]) -> None:
    """Train until `observe` ends it."""
    try:
        train(settings, observe=observe)
    except Killed:
        return
    raise AssertionError("the run was not killed")


def resumed(run: Path, observe: Callable[[Event], None] = lambda _: None) -> TrainReport:
    return train(validate(TrainSettings, {"resume": run}), observe=observe)


def curve(run: Path, kind: type[Event] = StepDone) -> dict[int, str]:
    """Step -> its loss to the bit; of a step that was taken again, the last one told."""
    lines = read(run / "telemetry.jsonl")
    return {line["step"]: float.hex(line["loss"]) for line in lines if line["event"] == kind.name}


def told_twice_alike(run: Path) -> bool:
    """Whether steps that were taken again gave the same loss again."""
    lines = [x for x in read(run / "telemetry.jsonl") if x["event"] == StepDone.name]
    return all(curve(run)[line["step"]] == float.hex(line["loss"]) for line in lines)


def assert_same_run(run: Path, whole: Path) -> None:
    """The same losses, validations and adapter, bit for bit."""
    assert curve(run) == curve(whole)
    assert curve(run, Validation) == curve(whole, Validation)
    assert (run / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    assert told_twice_alike(run)
