"""Test that randomness is a function of (run seed, step, micro-batch) only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from vox_core.contract import AdapterState, LowRank, Method, Step, TrainState
from vox_testing.jobs import SEED, batch, curve, documents, step, stirred
from vox_testing.subject import Run, Subject
from vox_testing.suite.load import relative
from vox_testing.suite.requirements import each_method, trains

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Doubles = NDArray[np.float64]

DROPOUT = 0.4
# Columns of each B, and steps, in which the rate is seen: 1280 inputs in all.
COLUMNS, DRAWS = 32, 4
# Standard deviations of a binomial share: one run in 10^8 is further off. They leave room for
# modules of one input that drop alike, as with weights laid side by side, which is 1.2 times it.
DEVIATIONS = 6.0
# Of the largest column; a smaller one may be noise. The keys' and queries' are 0, where a position
# sees nothing but itself. In bfloat16 DoRA's gain is rounded: 0.15 of a column of that size seen,
# where half of it decides between dropped and kept.
VISIBLE = 1e-2


@trains
def test_the_same_seed_gives_the_same_run(vox_subject: Subject) -> None:
    """The same seed gives the same bits on a CPU; elsewhere the order of sums may differ."""
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


@trains
@each_method
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_dropout_drops_at_the_rate_asked_for(
    vox_subject: Subject, method: Method, rate: float
) -> None:
    """Inputs are dropped with the given probability, and others scaled by 1 / (1 - rate).

    With B = 0 the gradient of B is g (A x)^T, where neither g nor x depends on what is dropped. A
    picks one input in each row here and one position is trained, so a column of the gradient is
    that of a run without dropout, times 0 or 1 / (1 - rate).
    """
    (whole,) = _gradient_columns(vox_subject, method, 0.0, 1)
    drawn = _gradient_columns(vox_subject, method, rate, DRAWS)
    seen = VISIBLE * max(float(np.linalg.norm(column)) for column in whole)
    kept = [
        [float(c @ w) > 0.5 * float(w @ w) for c, w in zip(d, whole, strict=True)] for d in drawn
    ]
    told = [
        k for each in kept for k, w in zip(each, whole, strict=True) if np.linalg.norm(w) > seen
    ]
    spread = np.sqrt(rate * (1 - rate) / len(told))
    assert 1 - np.mean(told) == pytest.approx(rate, abs=DEVIATIONS * spread)
    for found, which in zip(drawn, kept, strict=True):
        expected = [w * k / (1 - rate) for w, k in zip(whole, which, strict=True)]
        apart = relative(np.concatenate(found), np.concatenate(expected))
        assert apart < vox_subject.tolerance.gradient, "what is kept is scaled by 1 / (1 - rate)"


def _gradient_columns(
    subject: Subject, method: Method, rate: float, count: int
) -> list[list[Doubles]]:
    """Return the gradient of every column of every B, for `count` steps with a learning rate of
    0."""
    plan = subject.plan(method=method, dropout=rate, clip=0.0)
    adapter = replace(plan.contract.adapter, rank=COLUMNS)
    plan = replace(plan, contract=replace(plan.contract, adapter=adapter))
    start = subject.start(plan)
    modules = {path: _picking(module) for path, module in start.adapter.modules.items()}
    start = replace(start, adapter=AdapterState(method, modules))
    # Of the two positions of the document the first is trained, which sees nothing but itself.
    one = (np.array([72, 105]), np.array([1, 0], np.float32))
    steps = [step(number, [[one]], lr=0.0) for number in range(1, count + 1)]
    states = subject.train(steps, plan, start, checkpoint_every=1).checkpoints
    after = [_first_moments(state) for state in states]
    before = [[np.zeros_like(B_OR) for B_OR in after[0]], *after]
    return [_columns(*pair) for pair in zip(after, before, strict=False)]


def _columns(after: list[Doubles], before: list[Doubles]) -> list[Doubles]:
    """Return the gradients between two states, from their first moments."""
    pairs = zip(after, before, strict=True)
    return [column for B_OR, earlier_OR in pairs for column in (B_OR - 0.9 * earlier_OR).T / 0.1]


def _picking(module: LowRank) -> LowRank:
    """Make each row of A select another input."""
    A_RI = np.zeros_like(module.A_RI)
    rank, inputs = A_RI.shape
    A_RI[np.arange(rank), np.arange(rank) * (inputs // rank)] = 1
    return replace(module, A_RI=A_RI)


def _first_moments(state: TrainState) -> list[Doubles]:
    """Return the first moments of every B, in a fixed order."""
    names = sorted(name for name in state.moments if name.endswith("lora_B.weight"))
    return [state.moments[name][0].astype(np.float64) for name in names]


def _dropped(subject: Subject, steps: list[Step]) -> Run:
    """Run with dropout, from an adapter that makes it visible."""
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
