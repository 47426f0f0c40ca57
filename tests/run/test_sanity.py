"""Warnings about learning rates and losses: bad runs have them, good ones do not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from tests.run.lines import read
from vox_core.config import TrainSettings, validate
from vox_core.contract import Notice, StepDone, Validation
from vox_core.run import controller
from vox_core.run.controller import LossWatch, rate_warning
from vox_core.run.progress import Progress
from vox_core.run.session import Session
from vox_core.run.train import train
from vox_testing.tiny import VOCABULARY

UNIFORM = math.log(VOCABULARY)


def step(number: int, loss: float, trained: int = 64) -> StepDone:
    return StepDone(number, loss, 1e-4, 1.0, 100, trained, 0.5)


def watching(*losses: float, ordered: bool = False, full: bool = False) -> LossWatch:
    return LossWatch(VOCABULARY, Progress(losses=losses), ordered=ordered, full=full)


def at_end(*losses: float, ordered: bool = False) -> str | None:
    """What is said at the end of a run with these losses."""
    found = [*watching(*losses, ordered=ordered).at_end()]
    assert [each.level for each in found] in ([], ["warning"])
    return found[0].message if found else None


@pytest.mark.parametrize(
    ("lr", "said"),
    [(1e9, "diverge"), (2e-2, "diverge"), (1e-2, None), (2e-4, None), (1e-7, None), (9e-8, "next")],
)
def test_rates_that_nobody_uses_are_warned_of(lr: float, said: str | None) -> None:
    found = rate_warning(lr, "lora")
    assert (found is None) == (said is None)
    if found and said:
        assert (
            found.level == "warning" and said in found.message and f"--lr {lr:g}" in found.message
        )


def test_full_fine_tuning_has_a_range_of_its_own() -> None:
    assert rate_warning(3e-3, "full") is None
    found = rate_warning(4e-3, "full")
    assert found and "to 0.003)" in found.message and "2e-05 is the default" in found.message


@pytest.mark.parametrize("first", [Validation(0, UNIFORM * 1.2), step(1, UNIFORM * 1.2)])
def test_a_first_loss_far_above_a_uniform_guess_is_told_once(first: StepDone | Validation) -> None:
    watch = watching()
    (said,) = watch(first)
    assert f"{UNIFORM * 1.2:.2f}, is far above ln(vocabulary) = {UNIFORM:.2f}" in said.message
    assert [*watch(step(2, UNIFORM + 1))] == []


def test_a_later_loss_above_a_uniform_guess_is_no_first_loss() -> None:
    watch = watching(full=True)
    (said,) = [*watch(step(1, UNIFORM * 1.08)), *watch(step(2, UNIFORM + 2))]
    assert said.level == "info" and "a new model needs an --lr of about 1e-3" in said.message
    assert [*watching(2.0)(step(2, UNIFORM + 1))] == []


def test_an_adapter_of_a_model_that_was_never_trained_is_warned_of() -> None:
    (said,) = watching()(step(1, UNIFORM))
    assert said.level == "warning"
    assert "a new model needs --method full, not an adapter, and an --lr" in said.message
    assert [*watching()(step(1, UNIFORM * 0.97))] == []
    assert [*watching()(step(1, UNIFORM * 2, trained=63))] == [], "a few answers may be unusual"


def test_a_run_that_ends_at_a_uniform_guess_is_warned_of() -> None:
    assert "no better than a uniform guess" in (at_end(2.3, *[UNIFORM] * 6) or "")
    assert "no better" in (at_end(2.3, 9.0, 9.0, 9.0) or "")
    assert at_end(2.3, 4.0, 3.0, 2.5) is None
    assert at_end() is None
    assert at_end(9.0, 9.0, 9.0) is None, "three steps have no last quarter"


def test_a_rise_is_told_from_20_steps_on() -> None:
    rng = random.Random(0)
    risen = [2.3 + min(1.5, 0.2 * i) + rng.gauss(0, 0.1) for i in range(40)]
    said = at_end(*risen) or ""
    assert "rose from 2." in said and "to 3." in said
    assert at_end(*risen[:19]) is None
    assert at_end(*risen, ordered=True) is None
    assert at_end(*reversed(risen)) is None


FLAT: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda rng: rng.gauss(2, 0.3),
    "narrow": lambda rng: rng.gauss(2, 0.06),
    "log-normal": lambda rng: 2 * math.exp(rng.gauss(0, 0.5)),
    "some easy": lambda rng: rng.gauss(0.3, 0.1) if rng.random() < 0.1 else rng.gauss(2, 0.4),
    "some hard": lambda rng: rng.gauss(5, 0.1) if rng.random() < 0.1 else rng.gauss(1, 0.1),
}


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("steps", [20, 100])
def test_losses_that_neither_rise_nor_fall_are_hardly_ever_warned_of(kind: str, steps: int) -> None:
    rng = random.Random(1)
    false = sum(at_end(*(FLAT[kind](rng) for _ in range(steps))) is not None for _ in range(1000))
    assert false <= 10  # 1 %; falling losses have fewer


def test_warnings_are_in_the_terminal_the_telemetry_and_the_report(tiny, settings, monkeypatch):
    monkeypatch.setattr(controller, "_UNIFORM", 0.0)  # any loss is as bad as a guess
    events = []
    report = train(settings(tiny("llama"), lr=0.1, max_steps=4), observe=events.append)
    told = [e.message for e in events if isinstance(e, Notice) and e.level == "warning"]
    written = [
        line["message"]
        for line in read(report.run / "telemetry.jsonl")
        if line["event"] == "warning"
    ]
    assert told == written == [*report.warnings]
    assert any("--lr 0.1 " in text for text in told)
    assert "no better than a uniform guess" in told[-1]


def test_a_resumed_run_is_judged_by_all_of_its_losses(tiny, settings, monkeypatch):
    seen = []
    monkeypatch.setattr(
        LossWatch, "at_end", lambda self: seen.append([*self._progress.losses]) or ()
    )
    halfway = []

    def stop(self) -> bool:
        halfway.append(1)
        return len(halfway) == 2

    with monkeypatch.context() as patch:
        patch.setattr(Session, "stop_requested", stop)
        report = train(settings(tiny("llama"), max_steps=4))
    assert report.stopped and len(seen[0]) == 2
    (report.run / "telemetry.jsonl").unlink()
    train(validate(TrainSettings, {"resume": report.run}))
    assert len(seen[1]) == 4 and seen[1][:2] == seen[0]
