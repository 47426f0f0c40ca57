"""Test states: whole, copies, and enough to resume from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from vox_core.contract import ExecutionPlan, Floats, Method, Step, TrainState, Update
from vox_testing.jobs import batch, curve, documents, stirred
from vox_testing.subject import NAME, Subject, learn
from vox_testing.suite.loss import distance
from vox_testing.suite.requirements import each_method, trains


@trains
@each_method
def test_a_resumed_run_is_the_uninterrupted_one(vox_subject: Subject, method: Method) -> None:
    """A resumed run equals the uninterrupted one, to the bit on a CPU."""
    plan = vox_subject.plan(method=method, dropout=0.1)
    assert_goes_on(vox_subject, plan, curve(6, groups=2))


def assert_goes_on(
    vox_subject: Subject, plan: ExecutionPlan, steps: Sequence[Step]
) -> Sequence[float]:
    """Assert that a run that is resumed after three steps equals the uninterrupted one; return its
    losses."""
    whole = vox_subject.train(steps, plan)
    first = vox_subject.train(steps[:3], plan)
    second = vox_subject.train(steps[3:], plan, first.state)
    losses = first.losses + second.losses
    assert losses == pytest.approx(whole.losses, rel=vox_subject.tolerance.loss)
    assert distance(second.state, whole.state) < vox_subject.tolerance.adapter
    if vox_subject.on_cpu:
        assert losses == whole.losses
        assert distance(second.state, whole.state) == 0
    return whole.losses


@trains
@each_method
def test_states_are_whole(vox_subject: Subject, method: Method) -> None:
    """States have canonical names, shapes and float32, moments for each tensor, and the given
    method and alpha."""
    plan = vox_subject.plan(method=method)
    start = vox_subject.start(plan)
    state = vox_subject.train(curve(2), plan, start).state
    assert (state.step, state.adapter.method) == (2, method)
    require_whole(state, start.adapter.tensors())
    alphas = {path: module.alpha for path, module in state.adapter.modules.items()}
    assert alphas == {path: module.alpha for path, module in start.adapter.modules.items()}
    untouched = [path for path, module in state.adapter.modules.items() if not module.B_OR.any()]
    assert untouched == [], "modules that training does not reach"


@trains
@each_method
def test_a_restored_state_is_the_same_to_the_bit(vox_subject: Subject, method: Method) -> None:
    """Values and moments; `step` counts updates, which two skipped steps are not."""
    plan = vox_subject.plan(method=method)
    state = replace(vox_subject.train(curve(3), plan).state, step=5, skipped=2)
    with vox_subject.learning(plan, state) as trainer:
        found = trainer.state(NAME)
        require_same(found, state)
        assert (found.step, found.skipped) == (3, 0), "`step` counts updates, `skipped` is 0"
        learn(trainer, batch(documents(1)), Update(4, 1e-3, 1.0))
        assert trainer.state(NAME).updates == 4


@trains
def test_a_state_does_not_change_later(vox_subject: Subject) -> None:
    """Neither one that was returned, nor the one that was given."""
    start = stirred(vox_subject.train(curve(1)).state)
    given = start.copy()
    with vox_subject.learning(start=start) as trainer:
        early = trainer.state(NAME)
        kept = early.copy()
        learn(trainer, batch(documents(2)), Update(2, 1e-2, 1.0))
        assert distance(trainer.state(NAME), kept) > 0
        require_same(early, kept)
    require_same(start, given)


def require_whole(state: TrainState, given: Mapping[str, Floats]) -> None:
    """Require float32 values and moments, in the shapes of `given`."""
    tensors = state.adapter.tensors()
    assert tensors.keys() == given.keys() == state.moments.keys()
    for name, value in tensors.items():
        for array in (value, *state.moments[name]):
            assert (array.dtype, array.shape) == (np.dtype("float32"), given[name].shape), name


def require_same(found: TrainState, expected: TrainState) -> None:
    """Require the same values, and the same moments where `expected` has some, to the bit."""
    values = found.adapter.tensors()
    for name, value in expected.adapter.tensors().items():
        assert np.array_equal(values[name], value), name
    for name, pair in expected.moments.items():
        for each, value in zip(found.moments[name], pair, strict=True):
            assert np.array_equal(each, value), f"moments of {name}"
