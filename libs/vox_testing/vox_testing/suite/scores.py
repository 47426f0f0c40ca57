"""Test log-probabilities: those of the target, where they are wanted, of base, adapter and learner.

Shape legend: T tokens of a batch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vox_core.contract import Batch, Floats, Method, Trainer, Update
from vox_testing.jobs import batch, documents, signed, stirred, without_scores
from vox_testing.reference import Doubles, Reference
from vox_testing.subject import NAME, Subject, learn
from vox_testing.suite.load import TOKENS, effective, relative, require_near
from vox_testing.suite.requirements import each_method, loads, trains

# What masks of dropout 0.4 do to log-probabilities, relative. Seen with the CPU backend: 0.1.
DROPPED = 1e-3
# What an update at a learning rate of 0.01 does to them. Seen with the CPU backend: 0.1.
LEARNT = 1e-3


@loads
@each_method
def test_log_probs_are_the_references(vox_subject: Subject, method: Method) -> None:
    """Base and adapter, at the positions of `scored_T`, with any weights."""
    reference, adapter = Reference.of(vox_subject.model), effective(vox_subject, method)
    some = scored()
    unweighted = replace(some, weights_T=np.zeros_like(some.weights_T))
    trained = without_scores(some)
    with vox_subject.loaded(adapter) as model:
        for name, state in ((None, None), ("a", adapter)):
            for each in (some, unweighted, trained):
                expected = reference.log_probs(each, state)
                _require_scores(vox_subject, model.log_probs(each, name), each, expected)


@loads
def test_log_probs_of_a_document_do_not_depend_on_the_others(vox_subject: Subject) -> None:
    some = documents(3, seed=5)
    with vox_subject.loaded(effective(vox_subject)) as model:
        whole = model.log_probs(signed(batch(some)), "a")
        for document, extent in zip(some, batch(some).documents(), strict=True):
            alone = signed(batch([document]))
            require_near(vox_subject, model.log_probs(alone, "a"), whole[extent])


@trains
@each_method
def test_accumulate_returns_the_log_probs(vox_subject: Subject, method: Method) -> None:
    """With B != 0: the scale is alpha / r or alpha / sqrt(r), and DoRA's magnitudes count."""
    plan = vox_subject.plan(method=method)
    start, some = stirred(vox_subject.start(plan)), scored()
    with vox_subject.learning(plan, start) as trainer:
        found = trainer.accumulate(some, 0, NAME)
    expected = Reference.of(vox_subject.model).log_probs(some, start.adapter)
    _require_scores(vox_subject, found, some, expected)


@trains
@each_method
def test_a_learner_is_scored_as_it_is_now(vox_subject: Subject, method: Method) -> None:
    """Under its name, in `log_probs` and `logits`; None stays the base."""
    plan = vox_subject.plan(method=method)
    start, some = stirred(vox_subject.start(plan)), scored()
    reference = Reference.of(vox_subject.model)
    with vox_subject.learning(plan, start) as trainer:
        before = trainer.log_probs(some, NAME)
        require_scored_as_it_is_now(vox_subject, trainer, some)
        assert relative(trainer.log_probs(some, NAME), before) > LEARNT
        _require_scores(vox_subject, trainer.log_probs(some), some, reference.log_probs(some))
        require_near(vox_subject, trainer.logits(TOKENS), reference.logits(TOKENS))


def require_scored_as_it_is_now(subject: Subject, trainer: Trainer, some: Batch) -> None:
    """Require the reference's log-probabilities and logits after each of two updates."""
    reference = Reference.of(subject.model)
    for number in (1, 2):
        learn(trainer, some, Update(number, 1e-2, 1.0), seed=number)
        now = trainer.state(NAME).adapter
        found = trainer.log_probs(some, NAME)
        _require_scores(subject, found, some, reference.log_probs(some, now))
        require_near(subject, trainer.logits(TOKENS, NAME), reference.logits(TOKENS, now))


@trains
def test_an_adapter_beside_a_learner_stays(vox_subject: Subject) -> None:
    """As the reference model of an objective, which training does not change."""
    start, some = stirred(vox_subject.start(vox_subject.plan())), scored()
    fixed = effective(vox_subject, start.adapter.method, seed=3)
    expected = Reference.of(vox_subject.model).log_probs(some, fixed)
    with vox_subject.learning(start=start) as trainer:
        trainer.add_adapter("fixed", fixed)
        for number in (1, 2):
            _require_scores(vox_subject, trainer.log_probs(some, "fixed"), some, expected)
            learn(trainer, some, Update(number, 1e-2, 1.0))
        _require_scores(vox_subject, trainer.log_probs(some, "fixed"), some, expected)


@trains
@each_method
def test_scores_and_gradients_see_the_same_dropout(vox_subject: Subject, method: Method) -> None:
    """With a seed as `accumulate` does with it; without one, nothing is dropped."""
    plan = vox_subject.plan(method=method, dropout=0.4)
    start, some = stirred(vox_subject.start(plan)), scored()
    with vox_subject.learning(plan, start) as trainer:
        trained, scores = trainer.accumulate(some, 5, NAME), trainer.log_probs(some, NAME, 5)
        require_near(vox_subject, scores, trained)
        assert relative(trainer.log_probs(some, NAME, 6), trained) > DROPPED
        assert relative(trainer.log_probs(some, NAME), trained) > DROPPED
        expected = Reference.of(vox_subject.model).log_probs(some, start.adapter)
        _require_scores(vox_subject, trainer.log_probs(some, NAME), some, expected)


def scored() -> Batch:
    """Return documents of which some positions are trained, with weights of both signs, others are
    scored alone, and others neither."""
    some = signed(batch(documents(3, seed=11)))
    every_third = np.arange(len(some.tokens_T)) % 3 == 0
    return replace(some, scored_T=some.scored_T & ~every_third)


def _require_scores(subject: Subject, found: Floats, some: Batch, expected: Doubles) -> None:
    assert (found.dtype, found.shape) == (np.dtype("float32"), some.tokens_T.shape)
    assert not found[~some.scored_T].any(), "not asked for"
    require_near(subject, found, expected)
