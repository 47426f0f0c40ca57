"""Test the method `full`: the model's own weights are trained, and there is no adapter.

Every weight, some linear modules alone, and a model whose output head is its embedding.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vox_core.contract import DType, ExecutionPlan
from vox_testing.jobs import batch, curve, documents, signed, start, stirred
from vox_testing.llama import write_llama
from vox_testing.subject import NAME, Subject
from vox_testing.suite.generate import Row, require_sampled_as_it_is_now
from vox_testing.suite.gradients import require_one_pass
from vox_testing.suite.load import TOKENS
from vox_testing.suite.optimizer import require_trained
from vox_testing.suite.requirements import each_short_dtype, needs, trains
from vox_testing.suite.scores import require_scored_as_it_is_now
from vox_testing.suite.state import assert_goes_on, require_same, require_whole

TIED: dict[str, Any] = {"tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "every weight": {},
    "a tied head": {"config": TIED},
    "some modules": {"targets": ("q_proj", "down_proj")},
}
each_model = pytest.mark.parametrize("model", MODELS)
full = needs(method="full", family="llama")


@trains
@full
@each_model
def test_full_trains_the_weights(vox_subject: Subject, model: str, tmp_path: Path) -> None:
    """Their log-probabilities, gradients and updates, from other values than the folder's. Norms
    do not decay."""
    subject, plan = _model(vox_subject, model, tmp_path)
    begin, some = stirred(start(subject.model, plan)), signed(batch(documents(3)))
    require_trained(subject, plan, begin, some)


@trains
@full
@each_model
def test_full_is_scored_as_it_is_now(vox_subject: Subject, model: str, tmp_path: Path) -> None:
    """In `log_probs` and `logits`, under the learner's name."""
    subject, plan = _model(vox_subject, model, tmp_path)
    with subject.learning(plan, start(subject.model, plan)) as trainer:
        require_scored_as_it_is_now(subject, trainer, signed(batch(documents(2))))


@trains
@full
def test_full_is_sampled_from_as_it_is_now(vox_subject: Subject) -> None:
    """By a row that enters before an update, and by one that enters after it."""
    plan, row = vox_subject.plan(method="full"), Row(TOKENS, NAME, tuple(range(100, 104)))
    with vox_subject.learning(plan) as trainer:
        require_sampled_as_it_is_now(vox_subject, trainer, [row])


@trains
@full
@needs(one_pass=True)
def test_full_in_one_pass_is_in_two(vox_subject: Subject) -> None:
    """With the gradient of the output head."""
    require_one_pass(vox_subject, vox_subject.plan(method="full"))


@trains
@full
def test_full_has_a_state_of_every_weight(vox_subject: Subject) -> None:
    """Names, shapes and float32 of the plan's tensors, and moments for each; restored to the
    bit."""
    plan = vox_subject.plan(method="full")
    begin = vox_subject.start(plan)
    state = vox_subject.train(curve(2), plan, begin).state
    given = begin.adapter.tensors()
    assert (state.step, state.adapter.method, state.adapter.modules) == (2, "full", {})
    assert given.keys() == plan.saved.keys()
    require_whole(state, given)
    with vox_subject.learning(plan, state) as trainer:
        require_same(trainer.state(NAME), state)


@trains
@full
def test_full_is_resumed(vox_subject: Subject) -> None:
    """A resumed run equals the uninterrupted one, to the bit on a CPU."""
    assert_goes_on(
        vox_subject, vox_subject.plan(method="full", weight_decay=0.1), curve(6, groups=2)
    )


@needs(operation="train")
@full
@each_short_dtype
def test_full_has_masters_in_float32(vox_subject: Subject, dtype: DType) -> None:
    """Steps below a short dtype's spacing still add up, in every tensor."""
    plan, rate = vox_subject.plan(method="full", dtype=dtype), 1e-6
    before = vox_subject.start(plan).adapter.tensors()
    after = vox_subject.train(curve(4, lr=rate), plan).state.adapter.tensors()
    for name, value in before.items():
        moved = np.abs(after[name] - value).max()
        assert rate < moved < 5 * rate, name


def _model(subject: Subject, model: str, folder: Path) -> tuple[Subject, ExecutionPlan]:
    options = dict(MODELS[model])
    if config := options.pop("config", None):
        subject = replace(subject, model=write_llama(folder, config=config))
    return subject, subject.plan(method="full", **options)
