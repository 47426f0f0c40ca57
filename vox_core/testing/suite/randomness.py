"""Randomness is a function of (run seed, step, micro-batch): never of a clock, a count or a cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vox_core.contract import Step, TrainState
from vox_core.testing.jobs import SEED, batch, curve, documents, stirred
from vox_core.testing.subject import Run, Subject
from vox_core.testing.suite.requirements import trains

DROPOUT = 0.4


@trains
def test_the_same_seed_gives_the_same_run(vox_subject: Subject) -> None:
    """To the bit on a CPU; elsewhere sums may come out in another order."""
    once, again = (_dropped(vox_subject, curve(4, groups=2)) for _ in range(2))
    _require_same(vox_subject, again, once)


@trains
def test_another_seed_gives_another_run(vox_subject: Subject) -> None:
    plan = vox_subject.plan(dropout=DROPOUT)
    start = stirred(vox_subject.start(plan))
    other = replace(plan, contract=replace(plan.contract, seed=SEED + 1))
    runs = [vox_subject.train(curve(1), each, start) for each in (plan, other)]
    assert runs[0].losses != pytest.approx(runs[1].losses, rel=1e-4)


@trains
def test_dropout_is_drawn_anew_for_each_step_and_micro_batch(vox_subject: Subject) -> None:
    """With a rate of 0 the same documents would otherwise give the same loss again."""
    some = batch(documents(3, seed=3))
    weight = float(some.weights_T.sum())
    first, second, both = (
        _dropped(vox_subject, [Step(number, batches, weight * len(batches), 0.0)]).losses[0]
        for number, batches in ((1, (some,)), (2, (some,)), (1, (some, some)))
    )
    assert first != pytest.approx(second, rel=1e-4), "steps 1 and 2 drop the same"
    assert both != pytest.approx(first, rel=1e-4), "micro-batches of one step drop the same"


@trains
def test_dropout_does_not_depend_on_what_came_before(vox_subject: Subject) -> None:
    """Step 3 of a run is step 3 of one that was resumed there."""
    steps = curve(3, groups=2, lr=0.0)
    whole, tail = _dropped(vox_subject, steps), _dropped(vox_subject, steps[2:])
    assert tail.losses == pytest.approx(whole.losses[2:], rel=vox_subject.tolerance.loss)


def _dropped(subject: Subject, steps: list[Step]) -> Run:
    """A run with dropout, from an adapter on which it shows."""
    plan = subject.plan(dropout=DROPOUT)
    start: TrainState = stirred(subject.start(plan))
    return subject.train(steps, plan, replace(start, step=steps[0].number - 1))


def _require_same(subject: Subject, run: Run, expected: Run) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=subject.tolerance.loss)
    if subject.on_cpu:
        assert run.losses == expected.losses
        values = expected.state.adapter.tensors()
        for name, value in run.state.adapter.tensors().items():
            assert np.array_equal(value, values[name]), name
