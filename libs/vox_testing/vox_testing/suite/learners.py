"""Test several learners on one base: each is as it would be alone."""

from __future__ import annotations

import pytest

from vox_core.api.training import Learner
from vox_core.contract import ExecutionPlan, TrainState
from vox_testing.jobs import batch, curve, documents, signed, stirred
from vox_testing.reference import Reference
from vox_testing.subject import Run, Subject
from vox_testing.suite.load import require_near
from vox_testing.suite.loss import distance
from vox_testing.suite.requirements import needs, trains
from vox_testing.suite.state import require_same

SEEDS = (1, 2, 3)
STEPS = curve(4, groups=2)


@trains
@needs(learners=True)
def test_learners_on_one_base_are_as_alone(vox_subject: Subject) -> None:
    """Three of them, their steps interleaved, with dropout and decay: to the bit on a CPU."""
    plan = vox_subject.plan(dropout=0.1, weight_decay=0.1)
    alone = [vox_subject.train(STEPS, plan, start) for start in _starts(vox_subject, plan)]
    with vox_subject.trainer(plan, STEPS) as trainer:
        learners = [
            Learner(trainer, start, plan.contract.optimizer, plan.contract.seed, f"learner {index}")
            for index, start in enumerate(_starts(vox_subject, plan))
        ]
        taken = [[learner.take(step) for learner in learners] for step in STEPS]
        for index, (learner, expected) in enumerate(zip(learners, alone, strict=True)):
            run = Run([each[index] for each in taken], [learner.state()])
            _require_alike(vox_subject, run, expected)


@trains
@needs(learners=True)
def test_gradients_of_learners_stay_apart(vox_subject: Subject) -> None:
    """A learner's gradient is unchanged by another that discards and is removed; the base stays."""
    plan = vox_subject.plan()
    first, second, _ = _starts(vox_subject, plan)
    some, expected = signed(batch(documents(2))), vox_subject.train(STEPS[:1], plan, first)
    with vox_subject.trainer(plan) as trainer:
        learner = Learner(trainer, first, plan.contract.optimizer, plan.contract.seed)
        trainer.add_learner("other", second)
        trainer.accumulate(some, 0, "other")
        events = [learner.take(STEPS[0])]
        _require_alike(vox_subject, Run(events, [learner.state()]), expected)
        require_same(trainer.state("other"), second)
        trainer.discard("other")
        trainer.remove_learner("other")
        _require_alike(vox_subject, Run(events, [learner.state()]), expected)
        base = Reference.of(vox_subject.model)
        require_near(vox_subject, trainer.log_probs(some), base.log_probs(some))
        trainer.add_learner("other", first)
        require_same(trainer.state("other"), first)


def _starts(subject: Subject, plan: ExecutionPlan) -> list[TrainState]:
    return [stirred(subject.start(plan), seed=seed) for seed in SEEDS]


def _require_alike(subject: Subject, run: Run, expected: Run) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=subject.tolerance.loss)
    assert distance(run.state, expected.state) < subject.tolerance.adapter
    if subject.on_cpu:
        assert run.losses == expected.losses
        require_same(run.state, expected.state)
