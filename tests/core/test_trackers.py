"""What a tracker draws of each event, and when its run begins and ends."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from vox_core.contract import (
    Event,
    Notice,
    ObjectiveMetrics,
    Outcome,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)
from vox_core.trackers import Tracker, scalars

STEP = StepDone(3, 2.0, 1e-4, 0.5, 100, 40, 0.5)


def start(run: str) -> RunStart:
    return RunStart(run, "m", "cpu", "a CPU", "fp32", "0" * 64, 1, 4, 8, 99, 40)


class Told:
    """Curves that keep what they were told, all runs in one list."""

    log: list[object]

    def __init__(self, start: RunStart) -> None:
        self.log.append(start.run)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.log.append((step, *values))

    def close(self, outcome: Outcome) -> None:
        self.log.append(outcome)


@pytest.fixture
def log() -> list[object]:
    Told.log = []
    return Told.log


def tell(*events: Event) -> None:
    tracker = Tracker(Told, lambda: Told.log.append("prepared"))
    for event in events:
        tracker.vox_event(event)


def test_a_run_begins_with_its_first_number(log: list[object]) -> None:
    tell(Notice("ready"), start("a"), Notice("read"))
    assert log == ["prepared"], "a run that vox refuses leaves nothing"
    tell(start("a"), RunEnd(0, "failed", 1.0))
    assert log == ["prepared"] * 2


def test_one_run_after_another(log: list[object]) -> None:
    valid = Validation(0, 5.0)
    tell(start("a"), valid, RunEnd(0, "stopped", 1.0), start("b"), valid, start("c"), valid)
    drawn = (0, "validation/loss")
    assert log == [
        *("prepared", "a", drawn, "stopped"),
        *("prepared", "b", drawn, "failed"),  # it was killed
        *("prepared", "c", drawn),
    ]


def test_the_numbers_of_each_event() -> None:
    numbers = {
        "train/loss": 2.0,
        "train/learning_rate": 1e-4,
        "train/gradient_norm": 0.5,
        "train/trained_tokens": 40,
        "train/tokens_per_second": 200,
    }
    assert scalars(STEP) == (3, numbers)
    assert scalars(Validation(0, -0.5, 0.5)) == (0, {"validation/reward": 0.5})
    metrics = {"reward": 0.5, "rewards/numeric/mean": 0.25}
    drawn = {"train/reward": 0.5, "train/rewards/numeric/mean": 0.25}
    assert scalars(ObjectiveMetrics(1, metrics)) == (1, drawn)
    assert not scalars(Notice("ready"))[1]
