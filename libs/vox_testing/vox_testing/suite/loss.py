"""Test the losses of runs of several steps, and that they fall."""

from __future__ import annotations

import numpy as np
import pytest

from vox_core.contract import DType, ExecutionPlan, Method, TrainState
from vox_testing.jobs import curve, documents, step, stirred
from vox_testing.reference import Reference
from vox_testing.subject import Subject
from vox_testing.suite.requirements import each_method, each_short_dtype, needs, trains
from vox_testing.tolerance import tolerance


@trains
@each_method
def test_the_first_loss_is_the_base_models(vox_subject: Subject, method: Method) -> None:
    """B = 0 at the start, so the adapter of any method has no effect yet.

    Nor has it later, at a rate of 0: one loss alone may be near by chance in a short dtype.
    """
    steps, reference = curve(4, groups=2, lr=0.0), Reference.of(vox_subject.model)
    run = vox_subject.train(steps, vox_subject.plan(method=method))
    expected = [reference.loss(one) for one in steps]
    assert run.losses == pytest.approx(expected, rel=vox_subject.tolerance.loss)


@trains
def test_a_long_document_is_trained_whole(vox_subject: Subject) -> None:
    """A document of 150 tokens is not cut at either end where 160 are allowed."""
    plan = vox_subject.plan(seq_len=160)
    start = stirred(vox_subject.start(plan))
    one = step(1, [documents(1, seed=6, shortest=150, longest=151, uneven=True)])
    run = vox_subject.train([one], plan, start)
    expected = Reference.of(vox_subject.model).loss(one, start.adapter)
    assert run.losses[0] == pytest.approx(expected, rel=vox_subject.tolerance.loss)


@trains
def test_micro_batches_do_not_change_a_run(vox_subject: Subject) -> None:
    """Four micro-batches of one document equal one of four documents, for 20 steps."""
    whole = vox_subject.train(curve(20, groups=1))
    cut = vox_subject.train(curve(20, groups=4))
    assert cut.losses == pytest.approx(whole.losses, rel=vox_subject.tolerance.loss)
    assert distance(cut.state, whole.state) < vox_subject.tolerance.adapter


@trains
def test_the_loss_falls(vox_subject: Subject) -> None:
    require_falling(vox_subject, vox_subject.plan())


def require_falling(subject: Subject, plan: ExecutionPlan) -> None:
    """Require that twelve steps on the same documents take a fifth of the loss."""
    some = documents(4)
    steps = [step(number, [some], lr=1e-2) for number in range(1, 13)]
    losses = subject.train(steps, plan).losses
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
