"""Test stopping, resuming, checkpoints, validation and events."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from vox_core.contract import ExecutionPlan, Method, Step, StepDone, TrainState, Validation
from vox_testing.jobs import batch, curve, documents, stirred
from vox_testing.reference import Reference
from vox_testing.subject import Subject
from vox_testing.suite.loss import distance
from vox_testing.suite.requirements import each_method, trains

# The first moments after three steps and after one: 0.9 seen, in each dtype.
MOVED = 1e-1


@trains
@each_method
def test_a_resumed_run_is_the_uninterrupted_one(vox_subject: Subject, method: Method) -> None:
    """A resumed run equals the uninterrupted one, to the bit on a CPU."""
    plan = vox_subject.plan(method=method, dropout=0.1)
    assert_goes_on(vox_subject, plan, curve(6, groups=2))


def assert_goes_on(
    vox_subject: Subject, plan: ExecutionPlan, steps: Sequence[Step]
) -> Sequence[float]:
    """Assert that a run stopped after three steps and resumed equals the uninterrupted one; return
    its losses."""
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
    given, tensors = start.adapter.tensors(), state.adapter.tensors()
    assert tensors.keys() == given.keys() == state.moments.keys()
    for name, value in tensors.items():
        for array in (value, *state.moments[name]):
            assert (array.dtype, array.shape) == (np.dtype("float32"), given[name].shape), name
    alphas = {path: module.alpha for path, module in state.adapter.modules.items()}
    assert alphas == {path: module.alpha for path, module in start.adapter.modules.items()}
    untouched = [path for path, module in state.adapter.modules.items() if not module.B_OR.any()]
    assert untouched == [], "modules that training does not reach"


@trains
def test_what_was_given_is_not_changed(vox_subject: Subject) -> None:
    plan = vox_subject.plan()
    start = stirred(vox_subject.start(plan))
    before = {name: value.copy() for name, value in start.adapter.tensors().items()}
    vox_subject.train(curve(1), plan, start)
    for name, value in start.adapter.tensors().items():
        assert np.array_equal(value, before[name]), name


@trains
def test_a_stop_is_obeyed_after_the_step(vox_subject: Subject) -> None:
    steps = curve(5)
    run = vox_subject.train(steps, stop_after=2)
    assert (run.result.stopped, run.state.step) == (True, 2)
    assert [event.step for event in run.steps] == [1, 2]
    assert distance(run.state, vox_subject.train(steps[:2]).state) < vox_subject.tolerance.adapter


@trains
def test_a_run_that_is_not_stopped_ends_with_its_last_step(vox_subject: Subject) -> None:
    run = vox_subject.train(curve(3), vox_subject.plan(total_steps=3))
    assert (run.result.stopped, run.state.step) == (False, 3)


@trains
def test_checkpoints_are_made_when_due(vox_subject: Subject) -> None:
    """Each checkpoint is the state after its step, and does not change later."""
    steps = curve(4)
    run = vox_subject.train(steps, checkpoint_every=2)
    assert [state.step for state in run.checkpoints] == [2, 4]
    early, late = run.checkpoints
    expected = vox_subject.train(steps[:2]).state
    assert distance(early, expected) < vox_subject.tolerance.adapter
    assert _moments_apart(early, expected) < vox_subject.tolerance.adapter
    assert distance(late, run.state) == 0


@trains
def test_a_checkpoint_has_moments_that_stay(vox_subject: Subject) -> None:
    run = vox_subject.train(curve(3), checkpoint_every=1)
    first, _, last = run.checkpoints
    assert _moments_apart(first, last) > MOVED


@trains
def test_events_tell_each_step(vox_subject: Subject) -> None:
    """There is one event per step, in order, with finite numbers that JSON can hold."""
    steps = [
        replace(one, lr=lr) for one, lr in zip(curve(3, groups=2), (1e-3, 2e-3, 0.0), strict=True)
    ]
    run = vox_subject.train(steps)
    assert [event.step for event in run.steps] == [1, 2, 3]
    for event, one in zip(run.steps, steps, strict=True):
        told = json.loads(json.dumps(asdict(event)))
        for name in ("startup_seconds", "seconds_left"):
            assert told.pop(name) is None, f"the core fills {name} in"
        memory = told.pop("memory")
        assert memory is None or (type(memory) is int and memory > 0), memory
        assert all(math.isfinite(value) for value in told.values()), told
        assert event.lr == one.lr
        assert event.tokens == sum(len(each.tokens_T) for each in one.batches)
        trained = sum(int((each.weights_T > 0).sum()) for each in one.batches)
        assert event.trained_tokens == trained
        assert event.seconds > 0
        assert event.grad_norm > 0


@trains
def test_validation_is_the_weighted_mean_without_dropout(vox_subject: Subject) -> None:
    """Validation runs before the first step of a fresh run, then after each step marked
    `evaluate`."""
    plan = vox_subject.plan(dropout=0.4)
    start = stirred(vox_subject.start(plan))
    held_out = tuple(batch(documents(count, seed=20 + count, uneven=True)) for count in (1, 3))
    steps = [replace(one, evaluate=one.number == 2) for one in curve(3)]
    run = vox_subject.train(steps, plan, start, validation=held_out)
    told = [event for event in run.events if isinstance(event, Validation)]
    assert [event.step for event in told] == [0, 2]
    order = [type(event) for event in run.events if isinstance(event, Validation | StepDone)]
    assert order == [Validation, StepDone, StepDone, Validation, StepDone]
    weight = sum(float(each.weights_T.sum()) for each in held_out)
    reference = Reference.of(vox_subject.model)
    expected = reference.weighted_nll(held_out, start.adapter) / weight
    assert told[0].loss == pytest.approx(expected, rel=vox_subject.tolerance.loss)
    resumed = vox_subject.train(steps[1:], plan, replace(start, step=1), validation=held_out)
    told = [event for event in resumed.events if isinstance(event, Validation)]
    assert [event.step for event in told] == [2]


def _moments_apart(state: TrainState, reference: TrainState) -> float:
    """Return the relative distance of all first moments together."""
    pairs = [(state.moments[name][0], first) for name, (first, _) in reference.moments.items()]
    difference = sum(float(((one - other) ** 2.0).sum()) for one, other in pairs)
    return float(np.sqrt(difference / sum(float((other**2.0).sum()) for _, other in pairs)))
