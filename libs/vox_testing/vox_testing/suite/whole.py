"""Test tensors that are trained whole (`modules_to_save`), and an adapter on the output head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vox_core.contract import ExecutionPlan, MergeTarget, Method, ModuleShape, TrainState
from vox_core.weights import WeightFolder
from vox_testing.jobs import batch, curve, documents, signed, stirred
from vox_testing.reference import Reference, merged_weight
from vox_testing.subject import Subject
from vox_testing.suite.load import TOKENS, relative, require_near
from vox_testing.suite.merge import FLOAT32
from vox_testing.suite.optimizer import require_trained
from vox_testing.suite.requirements import each_method, loads, merges, needs, trains
from vox_testing.suite.state import assert_goes_on

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
# Those of a head alone are also what a backend with an output of its own may forget.
CHOICES: dict[str, dict[str, Any]] = {
    "head and embedding whole": {"modules_to_save": (HEAD, EMBEDDING)},
    "adapter on the head": {"targets": ("all-linear", HEAD)},
}
each_choice = pytest.mark.parametrize("choice", CHOICES)


@loads
@needs(family="llama")
@each_choice
def test_whole_tensors_and_the_head_are_loaded(vox_subject: Subject, choice: str) -> None:
    """In logits and log-probabilities; the base stays what it is."""
    adapter = _start(vox_subject, _plan(vox_subject, choice)).adapter
    reference, some = Reference.of(vox_subject.model), signed(batch(documents(2)))
    with vox_subject.loaded(adapter) as model:
        for name, state in (("a", adapter), (None, None)):
            require_near(vox_subject, model.logits(TOKENS, name), reference.logits(TOKENS, state))
            expected = reference.log_probs(some, state)
            require_near(vox_subject, model.log_probs(some, name), expected)


@loads
@needs(family="llama", streamed_load=True)
@each_choice
def test_a_streamed_load_has_whole_tensors_and_the_head(vox_subject: Subject, choice: str) -> None:
    adapter = _start(vox_subject, _plan(vox_subject, choice)).adapter
    expected = Reference.of(vox_subject.model).logits(TOKENS, adapter)
    with vox_subject.loaded(adapter, streamed=True) as model:
        require_near(vox_subject, model.logits(TOKENS, "a"), expected)


@trains
@needs(family="llama")
@each_method
@each_choice
def test_whole_tensors_and_the_head_are_trained(
    vox_subject: Subject, choice: str, method: Method
) -> None:
    """Their log-probabilities, gradients and updates, and the decay of each of them."""
    plan = _plan(vox_subject, choice, method=method)
    start, some = _start(vox_subject, plan), signed(batch(documents(3)))
    require_trained(vox_subject, plan, start, some)


@trains
@needs(family="llama")
@each_choice
def test_whole_tensors_and_the_head_are_resumed(vox_subject: Subject, choice: str) -> None:
    assert_goes_on(vox_subject, _plan(vox_subject, choice), curve(6))


@merges
@needs(family="llama")
@each_choice
def test_whole_tensors_and_the_head_are_merged(vox_subject: Subject, choice: str) -> None:
    plan = _plan(vox_subject, choice)
    adapter, weights = _start(vox_subject, plan).adapter, WeightFolder(vox_subject.model)
    targets = [MergeTarget(path, shape) for path, shape in plan.modules.items()]
    targets += [
        MergeTarget(name, ModuleShape(plan.saved[name], *value.shape))
        for name, value in adapter.saved.items()
    ]
    for target, (name, found) in zip(
        targets, vox_subject.merge(adapter, targets, weights.read), strict=True
    ):
        if target.path in adapter.saved:
            assert np.array_equal(found, adapter.saved[target.path]), name
        else:
            expected = merged_weight(weights.read(name).astype(np.float64), adapter, target.path)
            assert relative(found, expected) < FLOAT32, name


def _plan(subject: Subject, choice: str, method: Method | None = None) -> ExecutionPlan:
    return subject.plan(method=method, **CHOICES[choice])


def _start(subject: Subject, plan: ExecutionPlan) -> TrainState:
    return stirred(subject.start(plan))
