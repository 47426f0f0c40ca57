"""Gradients of any weights, scores, and updates that change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from libs.vox_torch.tests.jobs import batch, documents, open_trainer, plan, start

from vox_core.contract import TrainState, Update
from vox_core.weights import WeightFolder
from vox_testing.float64 import compute_in_float64
from vox_testing.jobs import stirred
from vox_torch import forward, loss
from vox_torch.load import load
from vox_torch.profile import DeviceProfile

CPU = DeviceProfile("cpu")
WIDE = DeviceProfile("cpu", prepare=compute_in_float64)
NAME = "a.b"  # a name that is no attribute

# Two float32 orders of the same sums, of log-probabilities of about 6: seen are 1.2e-5, and 8.8e-5
# in Qwen3.5, whose recurrence multiplies decays over a document.
NATS, NATS_OF = 4e-5, {"qwen3_5": 3e-4}


def opened(folder, profile=CPU, dropout=0.0, saved=(), **plan_fields):
    made = replace(plan(folder, dropout=dropout), **plan_fields)
    trainer, _ = open_trainer(folder, made, profile=profile)
    state = stirred(start(folder, made))
    read = WeightFolder(folder).read
    values = {name: read(name).astype(np.float32) for name in saved}
    state = TrainState(0, replace(state.adapter, saved=values))
    trainer.add_learner(NAME, state)
    return trainer, state


def signed(count=3, seed=0):
    """Documents with weights of both signs, and scored positions that are not trained."""
    some = batch(documents(count, seed=seed))
    random = np.random.default_rng(seed)
    weights_T = (some.weights_T * random.normal(size=len(some.weights_T))).astype(np.float32)
    scored_T = some.scored_T | (random.random(len(weights_T)) < 0.3)
    last = [document.stop - 1 for document in some.documents()]
    scored_T[last] = False
    return replace(some, weights_T=weights_T, scored_T=scored_T)


def gradients(trainer):
    """The accumulated gradients, by name: the learner's masters hold them."""
    optimizer = trainer._learners[NAME]
    return {name: master.grad.clone() for name, master in optimizer._masters.items()}


def update(number=1, total_weight=1.0, **numbers):
    return Update(number, 1e-3, total_weight, **numbers)


@pytest.mark.parametrize("layout", ["end-to-end", "padded"])
@pytest.mark.parametrize("saved", [(), ("lm_head.weight",)])
def test_the_gradient_is_that_of_weighted_log_probs(tiny, monkeypatch, layout, saved):
    """Against central differences in float64, along random directions."""
    monkeypatch.setattr(loss, "CHUNK_ON_CPU", 7 * 300)  # several chunks, and a last short one
    trainer, _ = opened(tiny("llama"), WIDE, saved=saved, tuning={"layout": layout})
    some = signed()
    assert (some.weights_T < 0).any() and (some.scored_T & (some.weights_T == 0)).any()
    log_probs_T = trainer.accumulate(some, 1, NAME)
    np.testing.assert_array_equal(log_probs_T, trainer.log_probs(some, NAME))
    assert (log_probs_T[~some.scored_T] == 0).all() and (log_probs_T[some.scored_T] < 0).all()
    found, values = gradients(trainer), trainer._learners[NAME]._parameters
    names = list(found)

    def objective(direction, size):
        with torch.no_grad():
            for value, way in zip(values, direction, strict=True):
                value.add_(way, alpha=size)
            scores = trainer._loss.log_probs(some)
            for value, way in zip(values, direction, strict=True):
                value.sub_(way, alpha=size)
        weights_K = torch.tensor(some.weights_T[scores.positions_K])
        return -float((weights_K * scores.log_probs_K).sum())

    trainer._set_up(NAME, documents=True)
    for seed in range(3):
        torch.manual_seed(seed)
        direction = [torch.randn_like(value) for value in values]
        step = 1e-5
        expected = (objective(direction, step) - objective(direction, -step)) / (2 * step)
        along = sum(
            float((found[name] * way).sum()) for name, way in zip(names, direction, strict=True)
        )
        # The error of central differences is of the order of step^2 times the third derivative.
        assert along == pytest.approx(expected, rel=1e-6)


def test_positions_that_are_only_scored_change_no_gradient(tiny):
    some = signed()
    trainer, _ = opened(tiny("llama"))
    trainer.accumulate(some, 1, NAME)
    found = gradients(trainer)
    trainer.discard(NAME)
    trainer.accumulate(replace(some, scored_T=None), 1, NAME)
    for name, gradient in gradients(trainer).items():
        # Rows of other sizes in the same float32 products.
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    trainer.discard(NAME)
    nothing = replace(some, weights_T=np.zeros_like(some.weights_T))
    log_probs_T = trainer.accumulate(nothing, 1, NAME)
    assert not any(gradient.any() for gradient in gradients(trainer).values())
    np.testing.assert_array_equal(log_probs_T, trainer.log_probs(some, NAME))


@pytest.mark.parametrize("layout", ["end-to-end", "padded"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("saved", [(), ("lm_head.weight",)])
def test_one_pass_is_two_passes(tiny, monkeypatch, layout, dropout, saved):
    """The same operations on the same numbers: bit for bit where documents are concatenated."""
    monkeypatch.setattr(loss, "CHUNK_ON_CPU", 7 * 300)
    trainer, _ = opened(tiny("llama"), dropout=dropout, saved=saved, tuning={"layout": layout})
    some, called = signed(4), []
    some = replace(some, weights_T=np.zeros_like(some.weights_T))

    def weigh(log_probs_T):
        called.append(log_probs_T.copy())
        # Every third position gets no weight.
        return np.where(np.arange(len(log_probs_T)) % 3 == 0, 0, log_probs_T + 5.5).astype(
            np.float32
        ) * some.scored_T.astype(np.float32)

    found_T = trainer.accumulate(some, 3, NAME, weigh)
    one = gradients(trainer)
    trainer.discard(NAME)
    assert len(called) == 1
    log_probs_T = trainer.log_probs(some, NAME, seed=3)
    np.testing.assert_array_equal(called[0], log_probs_T)
    weighed = replace(some, weights_T=weigh(log_probs_T))
    # Chunks of other positions, in the order of the weights: float32 products of other sizes.
    np.testing.assert_allclose(trainer.accumulate(weighed, 3, NAME), found_T, rtol=0, atol=NATS)
    for name, gradient in gradients(trainer).items():
        assert (one[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_one_pass_computes_each_logit_once(tiny):
    trainer, _ = opened(tiny("llama"))
    head, seen = trainer._adapters.base.get_output_embeddings(), []
    some = signed(4)

    def weigh(log_probs_T):
        seen.append("weighed")
        return (some.scored_T * log_probs_T).astype(np.float32)

    hook = head.register_forward_hook(lambda _m, _i, out: seen.append(out[0].shape[0]))
    trainer.accumulate(some, 3, NAME, weigh)
    hook.remove()
    # The model's own call of its head is on no positions.
    assert [each for each in seen if each != 0] == [some.scored_T.sum(), "weighed"]


@pytest.mark.parametrize("when", ["body", "backward", "always"])
def test_one_pass_that_runs_out_of_memory_asks_once(tiny, monkeypatch, when):
    """Before the weights are known, or afterwards."""
    trainer, _ = opened(tiny("llama"))
    some = signed(4)
    some = replace(some, weights_T=np.zeros_like(some.weights_T))
    called = []

    def weigh(log_probs_T):
        called.append(log_probs_T)
        return (some.scored_T * (log_probs_T + 6)).astype(np.float32)

    trainer.accumulate(some, 3, NAME, weigh)
    expected = gradients(trainer)
    trainer.discard(NAME)
    called.clear()
    own = forward.Together.__call__

    def short(self, part, scale=1.0, weigh=None):
        if len(part.starts_D) > 2 and when == "body":
            raise torch.OutOfMemoryError("CUDA out of memory")
        found = own(self, part, scale, weigh)
        if len(part.starts_D) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(forward.Together, "__call__", short)
    trainer.accumulate(some, 3, NAME, weigh)
    if when == "always":  # the next batch is in halves from the beginning
        trainer.discard(NAME)
        called.clear()
        trainer.accumulate(some, 3, NAME, weigh)
    assert len(called) == 1
    for name, gradient in gradients(trainer).items():
        assert (expected[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("layout", ["end-to-end", "padded"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_seed_gives_scores_and_gradients_the_same_dropout(tiny, layout, recompute):
    trainer, _ = opened(
        tiny("llama"), dropout=0.3, tuning={"layout": layout}, gradient_checkpointing=recompute
    )
    some = signed(4)
    with_seed = trainer.log_probs(some, NAME, seed=5)
    np.testing.assert_array_equal(trainer.accumulate(some, 5, NAME), with_seed)
    np.testing.assert_array_equal(trainer.log_probs(some, NAME, seed=5), with_seed)
    assert np.abs(trainer.log_probs(some, NAME, seed=6) - with_seed).max() > 1e-3
    assert np.abs(trainer.log_probs(some, NAME) - with_seed).max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "gpt2"])
def test_log_probs_are_those_of_the_logits(tiny, family):
    """Of the learner and of the base, in a trainer and in a model."""
    trainer, state = opened(tiny(family))
    model = load_with(tiny(family), state)
    some, nats = signed(), NATS_OF.get(family, NATS)
    for name in (NAME, None):
        found_T, loaded_T = trainer.log_probs(some, name), model.log_probs(some, name)
        np.testing.assert_allclose(found_T, loaded_T, rtol=0, atol=nats)
        for each in some.documents():
            logits_LV = trainer.logits(some.tokens_T[each], name).astype(np.float64)
            np.testing.assert_allclose(
                model.logits(some.tokens_T[each], name), logits_LV, rtol=0, atol=nats
            )
            row = np.arange(len(logits_LV))
            wanted = logits_LV[row, some.targets_T[each]] - np.logaddexp.reduce(logits_LV, axis=1)
            scored = some.scored_T[each]
            np.testing.assert_allclose(found_T[each][scored], wanted[scored], rtol=0, atol=nats)
    assert np.abs(trainer.log_probs(some, NAME) - trainer.log_probs(some)).max() > 1e-2


def load_with(folder, state):
    from vox_core.contract import LoadJob

    model = load(LoadJob(folder, "fp32"), CPU)
    model.add_adapter(NAME, state.adapter)
    return model


def same(one, other):
    left, right = one.adapter.tensors(), other.adapter.tensors()
    return one.step == other.step and all(
        np.array_equal(left[name], right[name])
        and all(map(np.array_equal, one.moments.get(name, ()), other.moments.get(name, ())))
        for name in left
    )


def test_an_update_that_is_not_finite_changes_nothing(tiny):
    trainer, state = opened(tiny("llama"))
    some = signed()
    trainer.accumulate(some, 1, NAME)
    trainer.update(update(), NAME)
    before = trainer.state(NAME)
    assert before.step == 1 and not same(before, state)
    for weight in (np.inf, np.nan, 1e37):  # 1e37: the squares of the gradient do not fit
        broken = replace(some, weights_T=np.where(some.weights_T != 0, weight, 0).astype("f4"))
        trainer.accumulate(broken, 1, NAME)
        assert not np.isfinite(trainer.update(update(2), NAME))
        assert same(trainer.state(NAME), before)
        assert not any(gradient.any() for gradient in gradients(trainer).values())


def test_what_is_discarded_is_forgotten(tiny):
    (one, _), (other, _) = opened(tiny("llama")), opened(tiny("llama"))
    one.accumulate(signed(seed=1), 1, NAME)
    one.discard(NAME)
    for trainer in (one, other):
        trainer.accumulate(signed(), 2, NAME)
        trainer.update(update(), NAME)
    assert same(one.state(NAME), other.state(NAME))


def test_the_norm_is_of_the_divided_gradients_and_clipping_comes_after(tiny):
    trainer, _ = opened(tiny("llama"))
    norms = []
    for clip in (0.0, 1e-3):
        for number, total_weight in enumerate((2.0, 4.0), 1):
            trainer.accumulate(signed(), 1, NAME)
            norms.append(trainer.update(update(number, total_weight, clip=clip), NAME))
    # An update of 1e-3 moves the gradient by a part of it.
    assert norms[0] == pytest.approx(2 * norms[1], rel=0.1)
    assert min(norms) > 1e-2


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
def test_the_bias_correction_follows_the_updates_number(tiny, optimizer):
    """A first update with the number 3 has moments of one gradient, corrected as if of three."""
    folder = tiny("llama")
    made = plan(folder, optimizer=optimizer)
    moved = {}
    for number in (1, 3):
        trainer, _ = open_trainer(folder, made)
        begun = stirred(start(folder, made))
        trainer.add_learner(NAME, begun)
        trainer.accumulate(signed(), 1, NAME)
        trainer.update(update(number, eps=0.0), NAME)
        assert trainer.state(NAME).step == number
        values = trainer.state(NAME).adapter.tensors()
        name = next(iter(values))
        moved[number] = np.abs(values[name] - begun.adapter.tensors()[name]).mean()
    expected = (1 - 0.9) / (1 - 0.9**3) * np.sqrt((1 - 0.999**3) / (1 - 0.999))
    assert moved[1] == pytest.approx(1e-3, rel=1e-3)
    assert moved[3] == pytest.approx(expected * 1e-3, rel=1e-3)
