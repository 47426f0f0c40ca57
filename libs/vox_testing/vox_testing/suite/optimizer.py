"""Test AdamW, clipping and learning rate, recomputed in float64 from the states of a run.

A state has the moments, from which its gradient follows: g = (m' - beta1 m) / (1 - beta1).
The update is then written out as in the paper (Loshchilov & Hutter, arXiv:1711.05101), algorithm 2
with a rate per step, and held against the state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vox_core.contract import Batch, ExecutionPlan, Method, Optimizer, TrainState, Update
from vox_testing.jobs import batch, curve, documents, stirred
from vox_testing.reference import Doubles, Reference
from vox_testing.subject import NAME, Run, Subject, learn
from vox_testing.suite.gradients import apart, gradient, require_gradient
from vox_testing.suite.load import relative, require_near
from vox_testing.suite.requirements import each_method, each_optimizer, needs, trains
from vox_testing.suite.state import assert_goes_on, require_same

# The gradient is recovered from rounded float32 moments, with an error of a few units of 2^-24 of m
# over 1 - beta1. Seen with the CPU backend: 6e-5 of the update.
MOMENT, UPDATE = 1e-4, 1e-3
# Half of float32's spacing, of a tensor that is much larger than its update.
ROUNDING = 2.0**-24
# A norm over all gradients, in float32. Seen with the CPU backend: 3e-7.
NORM = 1e-5
# With it each tensor of a tiny model has 4096 elements or more, which is where bitsandbytes begins
# to keep moments in 8 bits.
LARGE = 128
# The last loss of six over the first. Seen with the CPU backend: 0.76, with either optimizer.
FALLEN = 0.9
# Moments in 8 bits from those in float32. Seen with the CPU backend: 1.1e-2 and 6e-3.
ROUNDED = 1e-2
RATES = (1e-3, 4e-3, 2e-3, 1e-4)
# Of PyTorch's defaults and of others; 1e-3 is as large as the gradients are.
CONSTANTS: dict[str, dict[str, Any]] = {
    "the defaults": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "others": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-3},
}


@trains
@each_method
@pytest.mark.parametrize("constants", CONSTANTS)
def test_adamw_is_the_papers(vox_subject: Subject, method: Method, constants: str) -> None:
    """Moments, bias correction, decoupled decay of every tensor, and each step's own rate."""
    plan = vox_subject.plan(method=method, weight_decay=0.1, **CONSTANTS[constants])
    start = stirred(vox_subject.start(plan))
    steps = [replace(one, lr=lr) for one, lr in zip(curve(len(RATES)), RATES, strict=True)]
    states = vox_subject.train(steps, plan, start).states
    assert [state.step for state in states] == list(range(len(RATES) + 1))
    for before, after, lr in zip(states, states[1:], RATES, strict=False):
        require_adamw(before, after, Update.of(plan.contract.optimizer, after.step, lr, 1.0))


@trains
def test_the_number_of_an_update_decides_its_bias_correction(vox_subject: Subject) -> None:
    """Not how many updates the backend has seen: 5 follows a state of 2, and 3 follows 5."""
    start = stirred(vox_subject.train(curve(2)).state)
    with vox_subject.learning(start=start) as trainer:
        before = start
        for number in (5, 3):
            update = Update(number, 1e-3, 1.0, weight_decay=0.1)
            learn(trainer, batch(documents(2, seed=number)), update)
            after = trainer.state(NAME)
            require_adamw(before, after, update)
            before = after


def require_trained(subject: Subject, plan: ExecutionPlan, start: TrainState, some: Batch) -> None:
    """Require log-probabilities, gradient and an update with decay, of a learner at `start`."""
    expected = Reference.of(subject.model).log_probs(some, start.adapter)
    with subject.learning(plan, start) as trainer:
        require_near(subject, trainer.accumulate(some, 0, NAME), expected)
        trainer.discard(NAME)
        require_gradient(subject, gradient(trainer, some), some, start.adapter)
        before, update = trainer.state(NAME).copy(), Update(2, 1e-3, 1.0, weight_decay=0.1)
        learn(trainer, some, update)
        require_adamw(before, trainer.state(NAME), update)


def require_adamw(before: TrainState, after: TrainState, update: Update) -> None:
    """Require that an update of `before` is `after`, tensor by tensor."""
    for name, value in before.adapter.tensors().items():
        moments, expected = _updated(before, after, name, update)
        assert relative(after.moments[name][1], moments) < MOMENT, name
        moved = after.adapter.tensors()[name].astype(np.float64) - value
        allowed = UPDATE * np.linalg.norm(expected) + ROUNDING * np.linalg.norm(value)
        assert np.linalg.norm(moved - expected) < allowed, name


def _updated(
    before: TrainState, after: TrainState, name: str, update: Update
) -> tuple[Doubles, Doubles]:
    """Return the second moment after the update, and the expected change of the tensor."""
    value = before.adapter.tensors()[name].astype(np.float64)
    nothing = np.zeros_like(value)
    first, second = (np.float64(m) for m in before.moments.get(name, (nothing, nothing)))
    new_first = after.moments[name][0].astype(np.float64)
    gradient = (new_first - update.beta1 * first) / (1 - update.beta1)
    new_second: Doubles = update.beta2 * second + (1 - update.beta2) * gradient**2
    first_hat = new_first / (1 - update.beta1**update.number)
    second_hat = new_second / (1 - update.beta2**update.number)
    adam = first_hat / (np.sqrt(second_hat) + update.eps)
    decays = before.adapter.method != "full" or value.ndim > 1
    return new_second, -update.lr * (adam + update.weight_decay * decays * value)


@trains
@pytest.mark.parametrize("weight", [np.inf, np.nan, 3e38])
def test_a_gradient_that_is_not_finite_changes_nothing(vox_subject: Subject, weight: float) -> None:
    """Values and moments keep their bits, the norm that is returned is not finite, and what was
    accumulated is forgotten. Weights of 3e38 give a finite loss, and a finite norm where gradients
    are wider than float32."""
    start, good = stirred(vox_subject.train(curve(2)).state), batch(documents(2))
    with vox_subject.learning(start=start) as trainer:
        expected = gradient(trainer, good)
        before = trainer.state(NAME)
        for some in (good, _weighing(good, weight)):
            trainer.accumulate(some, 0, NAME)
        norm = trainer.update(Update(3, 1e-3, 1.0, clip=1.0, weight_decay=0.1), NAME)
        if np.isfinite(norm):
            assert weight == 3e38 and norm > np.finfo(np.float32).max
            return
        require_same(trainer.state(NAME), before)
        assert apart(gradient(trainer, good), expected) < vox_subject.tolerance.gradient


def _weighing(some: Batch, weight: float) -> Batch:
    weights_T = np.where(some.weights_T > 0, weight, 0).astype(np.float32)
    return replace(some, weights_T=weights_T)


@trains
@each_optimizer
def test_each_optimizer_learns_and_goes_on(vox_subject: Subject, optimizer: Optimizer) -> None:
    """Losses on the same documents fall, and a resumed run is the uninterrupted one."""
    plan = vox_subject.plan(method="lora", optimizer=optimizer, rank=LARGE)
    steps = [replace(one, number=n) for n in range(1, 7) for one in curve(1, lr=4e-3)]
    losses = assert_goes_on(vox_subject, plan, steps)
    assert losses[-1] < FALLEN * losses[0]


@trains
@needs(optimizer="adamw-8bit", method="lora")
def test_moments_in_8_bits_are_near_and_rounded(vox_subject: Subject) -> None:
    """After one step 8-bit moments are near those of float32, but not equal."""
    full, short = (_moments(vox_subject, name) for name in ("adamw", "adamw-8bit"))
    for kind in (0, 1):
        distance = relative(short[kind], full[kind])
        assert ROUNDED / 10 < distance < ROUNDED * 10, ("first", "second")[kind]


@trains
def test_the_gradient_is_clipped_to_the_norm(vox_subject: Subject) -> None:
    """The norm is global and reported before clipping; a smaller one does not change the
    gradient."""
    free = _first_step(vox_subject, clip=0.0)
    norm = free.steps[0].grad_norm
    assert _gradient_norm(free) == pytest.approx(norm, rel=NORM)
    for clip in (norm / 10, norm * 10):
        clipped = _first_step(vox_subject, clip=clip)
        assert clipped.steps[0].grad_norm == pytest.approx(norm, rel=NORM)
        # Frameworks divide by the norm plus 1e-6.
        assert _gradient_norm(clipped) == pytest.approx(min(norm, clip), rel=NORM + 1e-6 / norm)


def _first_step(subject: Subject, clip: float) -> Run:
    plan = subject.plan(clip=clip)
    return subject.train(curve(1, groups=2), plan, stirred(subject.start(plan)))


def _gradient_norm(run: Run) -> float:
    gradients = [first.astype(np.float64) / 0.1 for first, _ in run.state.moments.values()]
    return float(np.sqrt(sum((gradient**2).sum() for gradient in gradients)))


def _moments(subject: Subject, optimizer: Optimizer) -> tuple[Doubles, Doubles]:
    """Return all first and all second moments after a step."""
    plan = subject.plan(method="lora", optimizer=optimizer, rank=LARGE)
    moments = subject.train(curve(1), plan, stirred(subject.start(plan))).state.moments.values()
    first, second = (
        np.concatenate([np.float64(m[kind]).ravel() for m in moments]) for kind in (0, 1)
    )
    return first, second
