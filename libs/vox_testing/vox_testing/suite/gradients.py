"""Test what `accumulate` adds: the gradient of `-sum(weights_T * log_probs_T)`, of either sign.

A gradient is read from the state: with beta1 = 0, AdamW's first moment is the gradient of the last
update, and with a learning rate of 0 nothing moves. Its size and direction are held against slopes
of the float64 loss.

Shape legend: T tokens of a batch, M targets of a position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vox_core.contract import AdapterState, Batch, ExecutionPlan, Floats, Method, Trainer, Update
from vox_testing.jobs import batch, documents, signed, stirred, without_scores
from vox_testing.reference import Doubles, Reference
from vox_testing.subject import NAME, Subject
from vox_testing.suite.load import require_near
from vox_testing.suite.requirements import each_method, needs, trains

# Of a central difference: its error is of the order of the distance squared, 1e-8.
DISTANCE = 1e-4
# Times the tolerance of a kind's tensors together, for one of them alone: the roundings of 14
# average out. Seen: 4.2e-3 against 1.8e-3 in float16, 5.9e-2 against 2.2e-2 in bfloat16.
ALONE = 3


@trains
@each_method
def test_the_gradient_is_that_of_the_loss(vox_subject: Subject, method: Method) -> None:
    """With weights of either sign, and with positive uneven ones, for A, B and magnitudes."""
    plan = vox_subject.plan(method=method)
    start = stirred(vox_subject.start(plan))
    with vox_subject.learning(plan, start) as trainer:
        for some in (signed(batch(documents(4))), batch(documents(4, uneven=True))):
            found = gradient(trainer, some)
            require_gradient(vox_subject, found, some, start.adapter)


@trains
def test_weights_of_both_signs_cancel(vox_subject: Subject) -> None:
    start = stirred(vox_subject.start(vox_subject.plan()))
    some = signed(batch(documents(3)))
    with vox_subject.learning(start=start) as trainer:
        once = gradient(trainer, some)
        both = gradient(trainer, some, replace(some, weights_T=-some.weights_T))
    assert _norm(both) < vox_subject.tolerance.gradient * _norm(once)


@trains
def test_positions_without_weight_get_no_gradient(vox_subject: Subject) -> None:
    """Scored or not, with any target; a document's last position is one of them."""
    start = stirred(vox_subject.start(vox_subject.plan()))
    some = signed(batch(documents(3)))
    trained_T = some.weights_T != 0
    other_T = np.where(trained_T, some.targets_T, (some.targets_T + 1) % 256)
    idle = replace(some, weights_T=np.zeros_like(some.weights_T))
    with vox_subject.learning(start=start) as trainer:
        expected = gradient(trainer, without_scores(some))
        for batches in ([some], [replace(some, targets_T=other_T)], [some, idle]):
            assert apart(gradient(trainer, *batches), expected) < vox_subject.tolerance.gradient


@trains
def test_a_batch_without_scored_positions_adds_nothing(vox_subject: Subject) -> None:
    """As a document is whose log-probabilities an objective does not want."""
    start, some = stirred(vox_subject.start(vox_subject.plan())), batch(documents(2))
    nothing_T = np.zeros_like(some.weights_T)
    idle = Batch(some.tokens_T, some.targets_T, nothing_T, some.starts_D)
    with vox_subject.learning(start=start) as trainer:
        expected = gradient(trainer, some)
        assert not trainer.log_probs(idle, NAME).any()
        assert not trainer.accumulate(idle, 0, NAME).any()
        assert apart(gradient(trainer, some), expected) < vox_subject.tolerance.gradient


@trains
def test_gradients_of_batches_add_up(vox_subject: Subject) -> None:
    """Documents one by one, or all in one batch, in either order."""
    start, some = stirred(vox_subject.start(vox_subject.plan())), documents(3, uneven=True)
    with vox_subject.learning(start=start) as trainer:
        whole = gradient(trainer, batch(some))
        for cut in ([batch([each]) for each in some], [batch(some[::-1])]):
            assert apart(gradient(trainer, *cut), whole) < vox_subject.tolerance.gradient


@trains
@pytest.mark.parametrize("how", ["discard", "update"])
def test_what_was_accumulated_is_forgotten(vox_subject: Subject, how: str) -> None:
    """By `discard`, and by the `update` that applied it."""
    start = stirred(vox_subject.start(vox_subject.plan()))
    first, second = (batch(documents(2, seed=seed)) for seed in (1, 2))
    with vox_subject.learning(start=start) as trainer:
        expected = gradient(trainer, second)
        if how == "update":
            gradient(trainer, first)
        else:
            trainer.accumulate(first, 0, NAME)
            trainer.discard(NAME)
        assert apart(gradient(trainer, second), expected) < vox_subject.tolerance.gradient


@trains
def test_the_total_weight_divides_the_gradient(vox_subject: Subject) -> None:
    """Before the norm is taken, which is returned."""
    start, some = stirred(vox_subject.start(vox_subject.plan())), batch(documents(2))
    with vox_subject.learning(start=start) as trainer:
        whole = gradient(trainer, some)
        trainer.accumulate(some, 0, NAME)
        norm = trainer.update(Update(1, 0.0, 4.0, beta1=0.0), NAME)
        quarter = _first_moments(trainer)
    assert norm == pytest.approx(_norm(whole) / 4, rel=vox_subject.tolerance.gradient)
    four_times = {name: 4 * value for name, value in quarter.items()}
    assert apart(four_times, whole) < vox_subject.tolerance.gradient


@trains
@needs(one_pass=True)
def test_one_pass_is_two_passes(vox_subject: Subject) -> None:
    """Weights from the log-probabilities of the same forward, with dropout, are those from
    `log_probs` with its seed."""
    require_one_pass(vox_subject, vox_subject.plan(dropout=0.2))


@trains
@needs(several_targets=True)
def test_several_targets_of_a_position_add_up(vox_subject: Subject) -> None:
    """Log-probabilities and gradient are those of the batches that have one of the targets."""
    start, many = stirred(vox_subject.start(vox_subject.plan())), several_targets()
    columns = [
        replace(
            many,
            targets_T=many.targets_T[:, column],
            weights_T=many.weights_T[:, column],
            scored_T=many.scored_T[:, column],
        )
        for column in range(many.targets_T.shape[1])
    ]
    with vox_subject.learning(start=start) as trainer:
        expected_TM = np.stack([trainer.log_probs(each, NAME) for each in columns], 1)
        found_TM = trainer.log_probs(many, NAME)
        assert found_TM.dtype == np.float32
        require_near(vox_subject, found_TM * many.scored_T, expected_TM)
        told_TM = trainer.accumulate(many, 0, NAME)
        trainer.discard(NAME)
        require_near(vox_subject, told_TM * many.scored_T, expected_TM)
        expected = gradient(trainer, *columns)
        assert apart(gradient(trainer, many), expected) < vox_subject.tolerance.gradient


@trains
@needs(one_pass=True, several_targets=True)
def test_several_targets_in_one_pass_are_those_in_two(vox_subject: Subject) -> None:
    require_one_pass(vox_subject, vox_subject.plan(dropout=0.2), several_targets())


def several_targets() -> Batch:
    """Return documents with three targets at each scored position, two of them the same, and
    weights of both signs at some of them."""
    some = signed(batch(documents(3)))
    weights_TM = np.stack([np.roll(some.weights_T, step) for step in range(3)], 1)
    scored_TM = np.repeat(some.scored_T[:, None], 3, 1)
    targets_TM = (some.targets_T[:, None] + np.array([0, 7, 7])) % 256
    return replace(
        some,
        targets_T=targets_TM,
        weights_T=(weights_TM * scored_TM).astype(np.float32),
        scored_T=scored_TM,
    )


def require_one_pass(subject: Subject, plan: ExecutionPlan, some: Batch | None = None) -> None:
    """Require that `weigh` sees the log-probabilities, and its weights give their gradient."""
    start, some = stirred(subject.start(plan)), some or signed(batch(documents(3)))
    some, asked = replace(some, weights_T=np.zeros_like(some.weights_T)), []

    def weigh(log_probs_T: Floats) -> Floats:
        asked.append(log_probs_T.copy())
        return (some.scored_T * np.sin(3 * log_probs_T)).astype(np.float32)

    with subject.learning(plan, start) as trainer:
        scores_T = trainer.log_probs(some, NAME, 4)
        expected = gradient(trainer, replace(some, weights_T=weigh(scores_T)), seed=4)
        asked.clear()
        found_T = trainer.accumulate(some, 4, NAME, weigh)
        found = _take(trainer)
    assert len(asked) == 1
    for each_T in (*asked, found_T):
        assert (each_T.dtype, each_T.shape) == (np.dtype("float32"), some.targets_T.shape)
        require_near(subject, each_T, scores_T)
    assert apart(found, expected) < subject.tolerance.gradient


def gradient(trainer: Trainer, *batches: Batch, seed: int = 0) -> dict[str, Doubles]:
    """Return the gradient of the batches by canonical name, and change nothing but moments."""
    for some in batches:
        trainer.accumulate(some, seed, NAME)
    return _take(trainer)


def require_gradient(
    subject: Subject, found: dict[str, Doubles], some: Batch, adapter: AdapterState
) -> None:
    """Require that the slope of the float64 loss along a gradient is the gradient's norm, for A, B,
    magnitudes and whole tensors separately, and along the largest tensor of each kind alone."""
    reference = Reference.of(subject.model)
    kinds = {name.rpartition("lora_")[2] if "lora_" in name else name for name in found}
    for kind in sorted(kinds):
        along = {name: value for name, value in found.items() if name.endswith(kind)}
        largest = max(along, key=lambda name: float(np.linalg.norm(along[name])))
        for part, factor in ((along, 1), ({largest: along[largest]}, ALONE)):
            slope = _slope(reference, some, adapter, part)
            allowed = factor * subject.tolerance.gradient
            assert slope == pytest.approx(_norm(part), rel=allowed), kind


def _slope(
    reference: Reference, some: Batch, adapter: AdapterState, along: dict[str, Doubles]
) -> float:
    """Derivative of `-sum(weights_T * log_probs_T)` along a direction, by a central difference."""
    if adapter.method == "dora":
        reference = reference.with_norms_of(adapter)
    values, length, ends = adapter.tensors(), _norm(along), []
    for signed_distance in (DISTANCE, -DISTANCE):
        moved: dict[str, Any] = {
            name: along[name] * (signed_distance / length) + values[name] for name in along
        }
        there = adapter.with_tensors({**values, **moved})
        ends.append(reference.weighted_nll([some], there))
    return (ends[0] - ends[1]) / (2 * DISTANCE)


def _take(trainer: Trainer) -> dict[str, Doubles]:
    trainer.update(Update(1, 0.0, 1.0, beta1=0.0), NAME)
    return _first_moments(trainer)


def _first_moments(trainer: Trainer) -> dict[str, Doubles]:
    found = trainer.state(NAME).moments
    return {name: first.astype(np.float64) for name, (first, _) in found.items()}


def _norm(some: dict[str, Doubles]) -> float:
    return float(np.sqrt(sum((value**2).sum() for value in some.values())))


def apart(found: dict[str, Doubles], expected: dict[str, Doubles]) -> float:
    """Return the relative distance of two gradients."""
    return _norm({name: found[name] - expected[name] for name in expected}) / _norm(expected)
