"""Losses and validations so far: the best one, and what a checkpoint holds of them."""

from __future__ import annotations

import math

import pytest

from vox_core.contract import StepDone, Validation
from vox_core.run.progress import Progress


def seen(*losses: float, patience: int = 0) -> Progress:
    """Losses after steps 0, 1, 2, …"""
    return Progress(patience, validations=enumerate(losses))


@pytest.mark.parametrize(
    ("losses", "step", "since"),
    [
        ((1.0,), None, 0),  # the base model's
        ((1.0, 3.0, 2.0), 2, 0),
        ((1.0, 2.0, 2.0), 1, 1),  # as good is not better
        ((1.0, math.nan, 2.0, math.inf), 2, 1),
        ((1.0, math.nan, math.nan), None, 2),
        ((1.0, 2.0, 3.0, 4.0, 1.9, 5.0), 4, 1),
    ],
)
def test_the_best_and_how_many_since(losses, step, since):
    progress = seen(*losses)
    assert (progress.best_step, progress.since_best) == (step, since)


def test_patience():
    losses = (9.0, 2.0, 3.0, 3.0)
    assert not seen(*losses).exhausted
    assert not seen(*losses, patience=3).exhausted
    assert seen(*losses, patience=2).exhausted


def test_the_first_and_the_last_where_there_are_two():
    assert seen().first_and_last == seen(2.0).first_and_last == (None, None)
    assert seen(2.0, 1.0, 1.5).first_and_last == (2.0, 1.5)
    later = Progress(validations=[(50, 2.0), (60, 1.0)])  # of rows that came with a resume
    assert later.first_and_last == (None, None)


def test_what_a_checkpoint_holds_goes_on_as_if_nothing_had_been():
    through, halves = Progress(2), [Progress(2)]
    for step, loss in enumerate((3.0, 2.0, math.nan, 2.5), start=1):
        if step == 3:
            saved = halves[0].saved()
            assert saved["validations"] == ((1, 2.0), (2, 1.0))
            halves.append(Progress(2, **saved))
        for each in (through, halves[-1]):
            each(StepDone(step, loss, 1e-4, 1.0, 100, 40, 0.5))
            each(Validation(step, loss - 1))
    assert halves[-1].saved() == through.saved()
    assert through.saved()["losses"] == (3.0, 2.0, None, 2.5)
    assert halves[-1].best_step == through.best_step == 2
    assert halves[-1].exhausted and through.exhausted
