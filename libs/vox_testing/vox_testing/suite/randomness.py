"""Test that dropout is a function of the seed only, and what it reaches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vox_core.contract import AdapterState, LowRank, Method, TrainState
from vox_testing.jobs import batch, documents, step, stirred
from vox_testing.reference import Doubles, Reference
from vox_testing.subject import NAME, Subject
from vox_testing.suite.gradients import apart, gradient
from vox_testing.suite.load import relative, require_near
from vox_testing.suite.requirements import each_method, needs, trains

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
# Of another seed on log-probabilities and gradients, relative. Seen in every dtype: 0.10 and 1.0.
EFFECT = 3e-2
# Of what is dropped of DoRA's base part on log-probabilities. Seen in every dtype: 0.21; bfloat16's
# tolerance for logits, below which the dtype alone may be, is 0.1.
EFFECT_ON_BASE_PART = 0.15


@trains
def test_dropout_is_a_function_of_the_seed(vox_subject: Subject) -> None:
    """Equal seeds give equal log-probabilities and gradients, on a CPU bit for bit."""
    plan, some = vox_subject.plan(dropout=DROPOUT), batch(documents(2))
    with vox_subject.learning(plan, stirred(vox_subject.start(plan))) as trainer:
        first, other, again = (trainer.accumulate(some, seed, NAME) for seed in (3, 4, 3))
        trainer.discard(NAME)
        gradients = [gradient(trainer, some, seed=seed) for seed in (3, 4, 3)]
    require_near(vox_subject, again, first)
    assert relative(other, first) > EFFECT
    assert apart(gradients[2], gradients[0]) < vox_subject.tolerance.gradient
    assert apart(gradients[1], gradients[0]) > EFFECT
    if vox_subject.on_cpu:
        assert np.array_equal(again, first)
        assert apart(gradients[2], gradients[0]) == 0


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


@trains
@needs(method="dora")
def test_dropout_reaches_doras_base_part(vox_subject: Subject) -> None:
    """As in PEFT: y = W x + (g - 1) W drop(x) + g scale * B A drop(x), g = m / ||W + scale * B A||.

    So with B = 0 nothing changes where g is 1, and what is dropped shows where it is not.
    """
    plan = vox_subject.plan(method="dora", dropout=DROPOUT)
    start, some = vox_subject.start(plan), batch(documents(2))
    with vox_subject.learning(plan, start) as trainer:
        whole = trainer.log_probs(some, NAME)
        found = trainer.accumulate(some, 3, NAME)
        assert relative(found, whole) < vox_subject.tolerance.logits, "W x was dropped"
    stronger = replace(start, adapter=_with_magnitudes(start.adapter, 1.5))
    expected = Reference.of(vox_subject.model).log_probs(some, stronger.adapter)
    with vox_subject.learning(plan, stronger) as trainer:
        found = trainer.log_probs(some, NAME)
        require_near(vox_subject, found, expected)
        found = trainer.accumulate(some, 3, NAME)
        assert relative(found, expected) > EFFECT_ON_BASE_PART


def _with_magnitudes(adapter: AdapterState, factor: float) -> AdapterState:
    modules = {
        path: replace(module, magnitude_O=np.float32(factor) * module.magnitude_O)
        for path, module in adapter.modules.items()
        if module.magnitude_O is not None
    }
    return replace(adapter, modules=modules)


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
    after = [_first_moments(state) for state in subject.train(steps, plan, start).states[1:]]
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
