"""Learners of one base: what they have alone, the gradients of signed weights, and what is kept."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from vox_core.contract import Batch, Trainer, TrainJob, TrainState, Update, World
from vox_core.errors import AdapterError
from vox_core.run.learner import Learner
from vox_mlx import backend
from vox_testing import jobs
from vox_testing.llama import write_llama

ONE_STEP = Update(1, lr=1e-3, total_weight=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("learners") / "model")


def trainer(model: Path, **plan: object) -> Trainer:
    return backend.vox_train(TrainJob(jobs.plan(model, **plan), model), Mock(world=World()))


def start(model: Path, size: float = 0.2, **plan: object) -> TrainState:
    return jobs.stirred(jobs.start(model, jobs.plan(model, **plan)), size)


def saving(model: Path) -> TrainState:
    """Of the attention's inputs, and with a norm trained whole."""
    state = start(model, targets=("q_proj", "v_proj"), rank=2)
    whole = {"model.layers.0.input_layernorm.weight": np.full(64, 1.5, np.float32)}
    return replace(state, adapter=replace(state.adapter, saved=whole))


STARTS = {
    "plain": start,
    "head": lambda model: start(model, targets=("lm_head", "down_proj"), rank=3),
    "saving": saving,
}


@pytest.fixture
def batch() -> Batch:
    """Weights of both signs, and scored positions that are not trained."""
    made = jobs.batch(jobs.documents(3, seed=4, uneven=True))
    signs_T = np.where(np.arange(len(made.weights_T)) % 3, 1, -1).astype(np.float32)
    scored_T = np.ones(len(made.weights_T), np.bool_)
    scored_T[[document.stop - 1 for document in made.documents()]] = False
    return replace(made, weights_T=made.weights_T * signs_T, scored_T=scored_T)


def same(state: TrainState, other: TrainState) -> bool:
    """Bit for bit."""
    mine, others = tensors(state), tensors(other)
    return mine.keys() == others.keys() and all(np.array_equal(mine[n], others[n]) for n in mine)


def tensors(state: TrainState) -> dict[object, np.ndarray]:
    moments = {(n, i): m for n, pair in state.moments.items() for i, m in enumerate(pair)}
    return {**state.adapter.tensors(), **moments}


@pytest.mark.parametrize("recompute", [False, True])
def test_learners_that_share_a_base_are_what_they_are_alone(model, recompute):
    made = replace(jobs.plan(model, dropout=0.1), gradient_checkpointing=recompute)
    optimizer = made.contract.optimizer

    def several(names: list[str]) -> dict[str, tuple[list[float], TrainState]]:
        shared = backend.vox_train(TrainJob(made, model), Mock(world=World()))
        learners = {n: Learner(shared, STARTS[n](model), optimizer, 7, n) for n in names}
        losses: dict[str, list[float]] = {name: [] for name in names}
        for step in jobs.curve(3, groups=2):
            for name, learner in learners.items():
                losses[name].append(learner.take(step).loss)
        return {name: (losses[name], learners[name].state()) for name in names}

    together = several([*STARTS])
    for name in STARTS:
        losses, state = several([name])[name]
        assert together[name][0] == losses
        assert same(together[name][1], state)
        assert not same(state, STARTS[name](model))


def test_a_learner_that_leaves_changes_no_other(model, batch):
    shared = trainer(model)
    base_T = None
    for name, make in STARTS.items():
        shared.add_learner(name, make(model))
        base_T = shared.log_probs(batch) if base_T is None else base_T
    before_T = shared.log_probs(batch, "plain")
    shared.remove_learner("saving")
    shared.remove_learner("head")
    assert np.array_equal(shared.log_probs(batch, "plain"), before_T)
    assert np.array_equal(shared.log_probs(batch), base_T)
    shared.remove_learner("plain")
    assert np.array_equal(shared.log_probs(batch), base_T)
    assert not np.allclose(base_T, before_T, rtol=1e-3)


@pytest.mark.parametrize("name", STARTS)
def test_gradients_of_signed_weights_are_finite_differences(model, batch, name):
    begin = STARTS[name](model)
    shared = trainer(model)
    shared.add_learner("one", begin)
    shared.accumulate(batch, 0, "one")
    norm = shared.update(ONE_STEP, "one")
    # The first moment after one update, from zero.
    gradient = {n: first / 0.1 for n, (first, _) in shared.state("one").moments.items()}
    assert norm == pytest.approx(np.sqrt(dot(gradient, gradient)), rel=1e-5)

    random = np.random.default_rng(0)
    along = {n: g / norm for n, g in gradient.items()}
    across = {n: random.standard_normal(g.shape).astype(np.float32) for n, g in gradient.items()}
    size = np.sqrt(dot(across, across))
    for direction in (along, {n: d / size for n, d in across.items()}):
        step, found = 2e-3, []
        for sign in (1, -1):
            moved = {
                n: value + np.float32(sign * step) * direction[n]
                for n, value in begin.adapter.tensors().items()
            }
            shared.add_adapter("moved", begin.adapter.with_tensors(moved))
            log_probs_T = shared.log_probs(batch, "moved").astype(np.float64)
            found.append(-np.dot(batch.weights_T, log_probs_T))
            shared.remove_adapter("moved")
        # Some 60 log-probabilities of 1e-6 each, over 4e-3, and a third derivative times 4e-6.
        assert (found[0] - found[1]) / (2 * step) == pytest.approx(
            dot(gradient, direction), abs=2e-3 * norm
        )


def dot(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    return sum(float(np.vdot(one[n].astype(np.float64), other[n])) for n in one)


def test_log_probs_are_those_of_the_logits(model, batch):
    shared = trainer(model, dropout=0.5)
    shared.add_learner("one", start(model))
    shared.accumulate(batch, 0, "one")
    shared.update(ONE_STEP, "one")
    for name in ("one", None):
        log_probs_T = shared.log_probs(batch, name)
        assert log_probs_T.dtype == np.float32
        for document in batch.documents():
            logits_TV = shared.logits(batch.tokens_T[document], name).astype(np.float64)
            logits_TV -= np.log(np.exp(logits_TV).sum(-1, keepdims=True))
            targets_T1 = batch.targets_T[document][:, None]
            exact_T = np.take_along_axis(logits_TV, targets_T1, 1)[:, 0] * batch.scored_T[document]
            assert log_probs_T[document] == pytest.approx(exact_T, abs=1e-5)


def test_accumulating_returns_the_log_probs_of_its_seed_and_changes_nothing(model, batch):
    shared = trainer(model, dropout=0.5)
    shared.add_learner("one", start(model))
    before, seeds = shared.state("one"), {}
    for seed in (1, 2**62):
        seeds[seed] = shared.accumulate(batch, seed, "one")
        # The same graph, with and without its gradient.
        assert shared.log_probs(batch, "one", seed) == pytest.approx(seeds[seed], abs=1e-5)
        assert (seeds[seed][~batch.scored_T] == 0).all()
    assert not np.allclose(*seeds.values(), rtol=1e-3)
    assert not np.allclose(seeds[1], shared.log_probs(batch, "one"), rtol=1e-3)
    assert same(shared.state("one"), before)


def test_what_was_discarded_is_forgotten(model, batch):
    states = []
    for extra in (False, True):
        shared = trainer(model)
        shared.add_learner("one", start(model))
        if extra:
            shared.accumulate(batch, 0, "one")
            shared.discard("one")
        shared.accumulate(batch, 0, "one")
        shared.update(ONE_STEP, "one")
        states.append(shared.state("one"))
    assert same(*states)


def test_an_update_that_is_not_finite_changes_nothing_and_is_forgotten(model, batch):
    states = []
    for broken in (False, True):
        shared = trainer(model)
        shared.add_learner("one", start(model))
        before = shared.state("one")
        if broken:
            infinite_T = np.where(batch.weights_T != 0, np.float32(np.inf), 0)
            shared.accumulate(replace(batch, weights_T=infinite_T), 0, "one")
            assert not np.isfinite(shared.update(ONE_STEP, "one"))
            assert same(shared.state("one"), before)
        shared.accumulate(batch, 0, "one")
        assert np.isfinite(shared.update(ONE_STEP, "one"))
        states.append(shared.state("one"))
    assert same(*states)


def test_a_closed_trainer_frees_its_model(model, batch):
    made = trainer(model)
    made.add_learner("one", start(model))
    made.insert(0, batch.tokens_T[:4], "one")
    made.advance({})
    base = weakref.ref(made._base)
    made.close()
    assert base() is None


def test_a_saved_tensor_that_the_model_has_not_is_refused(model):
    state = start(model)
    strange = {
        "model.layers.9.input_layernorm.weight": np.ones(64, np.float32),
        "model.norm.weight": np.ones(8, np.float32),
    }
    with pytest.raises(AdapterError) as caught:
        trainer(model).add_learner(
            "one", replace(state, adapter=replace(state.adapter, saved=strange))
        )
    assert [fault.partition(": ")[2] for fault in caught.value.faults] == [
        "no such parameter",
        "(8,), the model has (64,)",
    ]


def test_an_adapter_of_another_base_is_refused_and_the_others_go_on(model, batch):
    shared = trainer(model)
    shared.add_learner("one", start(model))
    before_T = shared.log_probs(batch, "one")
    state = start(model)
    path = next(iter(state.adapter.modules))
    other = {path: replace(state.adapter.modules[path], A_RI=np.zeros((4, 8), np.float32))}
    with pytest.raises(AdapterError, match="A002"):
        shared.add_learner("two", replace(state, adapter=replace(state.adapter, modules=other)))
    assert np.array_equal(shared.log_probs(batch, "one"), before_T)
