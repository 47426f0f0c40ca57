"""Test the loss of a step and its gradient: sum(weight * nll) / total_weight, by document."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vox_core.contract import DType, Method, Step, TrainState
from vox_testing.jobs import batch, curve, documents, step, stirred
from vox_testing.reference import Reference
from vox_testing.subject import Subject
from vox_testing.suite.requirements import (
    each_method,
    each_short_dtype,
    needs,
    trains,
)
from vox_testing.tolerance import tolerance

if TYPE_CHECKING:
    from numpy.typing import NDArray


@trains
@each_method
def test_the_first_loss_is_the_base_models(vox_subject: Subject, method: Method) -> None:
    """B = 0 at the start, so the adapter has no effect yet, whatever the method.

    Nor has it later, at a rate of 0: one loss alone may be near by chance in a short dtype.
    """
    steps, reference = curve(4, groups=2, lr=0.0), Reference.of(vox_subject.model)
    run = vox_subject.train(steps, vox_subject.plan(method=method))
    expected = [reference.loss(one) for one in steps]
    assert run.losses == pytest.approx(expected, rel=vox_subject.tolerance.loss)


@trains
@each_method
def test_the_loss_is_that_of_base_and_adapter(vox_subject: Subject, method: Method) -> None:
    """With B != 0: the scale is alpha / r or alpha / sqrt(r), and DoRA's magnitudes count."""
    plan = vox_subject.plan(method=method)
    start = stirred(vox_subject.start(plan))
    (first,) = curve(1, groups=2)
    run = vox_subject.train([first], plan, start)
    expected = Reference.of(vox_subject.model).loss(first, start.adapter)
    assert run.losses[0] == pytest.approx(expected, rel=vox_subject.tolerance.loss)


@trains
def test_a_long_document_is_trained_whole(vox_subject: Subject) -> None:
    """A document of 150 tokens is not cut at either end where 160 are allowed."""
    plan = vox_subject.plan(seq_len=160)
    start = stirred(vox_subject.start(plan))
    one = step(1, [documents(1, seed=6, shortest=150, longest=151, uneven=True)])
    run = vox_subject.train([one], plan, start)
    expected = Reference.of(vox_subject.model).loss(one, start.adapter)
    assert run.losses[0] == pytest.approx(expected, rel=vox_subject.tolerance.loss)
    assert run.steps[0].tokens == 150


@trains
@each_method
def test_the_gradient_is_that_of_the_loss(vox_subject: Subject, method: Method) -> None:
    """The gradient equals the slope of the loss along it, for A, B and magnitudes separately.

    The slope is a central difference of the float64 loss, whose own error is of the order of its
    distance squared, 1e-8. AdamW's first moment after one step from nothing is 0.1 times the
    gradient.
    """
    plan = vox_subject.plan(method=method, clip=0.0)
    start = stirred(vox_subject.start(plan))
    (first,) = curve(1, groups=2)
    moments = vox_subject.train([first], plan, start).state.moments
    gradient = {name: first.astype(np.float64) / 0.1 for name, (first, _) in moments.items()}
    for kind in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"):
        along = {name: value for name, value in gradient.items() if name.endswith(kind)}
        if along:
            norm = float(np.sqrt(sum((value**2).sum() for value in along.values())))
            slope = _slope(Reference.of(vox_subject.model), first, start, along, norm)
            assert slope == pytest.approx(norm, rel=vox_subject.tolerance.gradient), kind


def _slope(
    reference: Reference, one: Step, start: TrainState, along: dict[str, NDArray[Any]], norm: float
) -> float:
    """Derivative of the float64 loss along a direction, by a central difference."""
    norms = reference.norms(start.adapter) if start.adapter.method == "dora" else None
    values, distance = start.adapter.tensors(), 1e-4
    ends = []
    for signed in (distance, -distance):
        moved: dict[str, Any] = {
            name: along[name] * (signed / norm) + values[name] for name in along
        }
        adapter = start.adapter.with_tensors({**values, **moved})
        ends.append(reference.loss(one, adapter, norms))
    return (ends[0] - ends[1]) / (2 * distance)


@trains
def test_micro_batches_do_not_change_a_step(vox_subject: Subject) -> None:
    """Four micro-batches of one document equal one of four documents."""
    whole = vox_subject.train(curve(20, groups=1))
    cut = vox_subject.train(curve(20, groups=4))
    assert cut.losses == pytest.approx(whole.losses, rel=vox_subject.tolerance.loss)
    assert distance(cut.state, whole.state) < vox_subject.tolerance.adapter


@trains
def test_documents_never_see_one_another(vox_subject: Subject) -> None:
    """The loss of a batch is that of its documents alone, in any order."""
    plan = vox_subject.plan()
    start = stirred(vox_subject.start(plan))
    some = documents(3, seed=5, uneven=True)

    def loss(*chosen: int) -> float:
        groups = [some[number] for number in chosen]
        one = replace(step(1, [groups]), total_weight=1.0)
        return vox_subject.train([one], plan, start).losses[0]

    alone = sum(loss(number) for number in range(3))
    assert loss(0, 1, 2) == pytest.approx(alone, rel=vox_subject.tolerance.loss)
    assert loss(2, 0, 1) == pytest.approx(alone, rel=vox_subject.tolerance.loss)


@trains
def test_untrained_positions_do_not_count(vox_subject: Subject) -> None:
    """Targets at positions with weight 0 have no effect, including a document's last one."""
    steps = curve(3)
    altered = []
    for one in steps:
        (whole,) = one.batches
        targets_T = np.where(whole.weights_T > 0, whole.targets_T, (whole.targets_T + 1) % 256)
        altered.append(replace(one, batches=(replace(whole, targets_T=targets_T),)))
    expected, run = vox_subject.train(steps), vox_subject.train(altered)
    assert run.losses == pytest.approx(expected.losses, rel=vox_subject.tolerance.loss)
    assert distance(run.state, expected.state) < vox_subject.tolerance.adapter


@trains
def test_a_micro_batch_without_trained_positions_adds_nothing(vox_subject: Subject) -> None:
    (plain,) = curve(1)
    idle = batch([(tokens, np.zeros_like(weights)) for tokens, weights in documents(2, seed=9)])
    run = vox_subject.train([replace(plain, batches=(*plain.batches, idle))])
    expected = vox_subject.train([plain])
    assert run.losses == pytest.approx(expected.losses, rel=vox_subject.tolerance.loss)


@trains
def test_the_loss_falls(vox_subject: Subject) -> None:
    some = documents(4)
    losses = vox_subject.train([step(number, [some], lr=1e-2) for number in range(1, 13)]).losses
    assert losses[-1] < 0.8 * losses[0]


@needs(operation="train")
@each_short_dtype
def test_a_short_dtype_trains(vox_subject: Subject, dtype: DType) -> None:
    """Near the float32 loss, and with float32 masters: steps below its spacing still add up."""
    plan = vox_subject.plan(dtype=dtype)
    steps = curve(6, lr=1e-5)
    run = vox_subject.train(steps, plan)
    expected = Reference.of(vox_subject.model).loss(steps[0])
    assert run.losses[0] == pytest.approx(
        expected, rel=tolerance(dtype, on_cpu=vox_subject.on_cpu).loss
    )
    before, after = vox_subject.start(plan).adapter.modules, run.state.adapter.modules
    moved = max(float(np.abs(after[path].A_RI - before[path].A_RI).max()) for path in before)
    # bfloat16's spacing at A's size of 0.1 is 5e-4; six steps of Adam are 6e-5 at most. B is still
    # tiny, so A's gradient is small, but Adam normalises it.
    assert 0 < moved < 2e-4


def distance(state: TrainState, reference: TrainState) -> float:
    """Return the relative distance of two adapters in the Frobenius norm."""
    ours, theirs = state.adapter.tensors(), reference.adapter.tensors()
    difference = sum(float(((ours[name] - theirs[name]) ** 2.0).sum()) for name in theirs)
    return float(np.sqrt(difference / sum(float((value**2.0).sum()) for value in theirs.values())))
