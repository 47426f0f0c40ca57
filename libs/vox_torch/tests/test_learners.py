"""Adapters and learners by name, on one base."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from libs.vox_torch.tests.jobs import (
    batch,
    documents,
    losses,
    open_trainer,
    plan,
    start,
    step,
    train,
)

from vox_core.contract import LoadJob, TrainState
from vox_core.errors import AdapterError
from vox_core.run.learner import Learner
from vox_core.weights import WeightFolder
from vox_testing.jobs import stirred
from vox_torch.base import load_base
from vox_torch.forward import Together
from vox_torch.inject import Adapters
from vox_torch.load import load
from vox_torch.prepacked import faster
from vox_torch.profile import DeviceProfile
from vox_torch.trial import relative_distance, tolerance

TOKENS = np.arange(5, 37, dtype=np.int64)


def begun(folder, made, seed, saved=()):
    state = start(folder, replace(made, contract=replace(made.contract, seed=seed)))
    read = WeightFolder(folder).read
    values = {name: read(name).astype(np.float32) for name in saved}
    return TrainState(0, replace(state.adapter, saved=values))


def assert_same(one: TrainState, other: TrainState) -> None:
    assert one.step == other.step
    for name, value in one.adapter.tensors().items():
        np.testing.assert_array_equal(value, other.adapter.tensors()[name], name)
        np.testing.assert_array_equal(one.moments[name], other.moments[name], name)


def test_a_whole_model_keeps_the_dtype_of_each_weight(tiny):
    """transformers keeps some in float32 (`_keep_in_fp32_modules`)."""
    base, whole = load_base(tiny("llama"), "bf16", "cpu"), plan(tiny("llama"), method="full")
    base.model.norm.float()
    parameters = Adapters(base).add("whole", start(tiny("llama"), whole).adapter)
    wide = {name for name, each in parameters.items() if each.dtype == torch.float32}
    assert wide == {"model.norm.weight"}


@pytest.mark.parametrize(
    ("family", "fields", "saved"),
    [
        ("llama", {}, [(), (), ()]),
        ("llama", {"dropout": 0.2}, [(), (), ()]),
        ("qwen3_5", {"method": "dora"}, [(), (), ()]),
        ("llama", {"quant": "nf4", "optimizer": "adamw-8bit"}, [(), (), ()]),
        # Trained whole: the head and a norm, by some of them.
        ("llama", {"targets": ("q_proj",)}, [(), ("lm_head.weight", "model.norm.weight"), ()]),
        ("llama", {"targets": ("q_proj",)}, [("model.norm.weight",), ("model.norm.weight",), ()]),
    ],
)
def test_three_learners_in_turn_are_each_alone(tiny, family, fields, saved):
    """Losses, adapters and moments, bit for bit."""
    folder = tiny(family)
    made = plan(folder, **fields)
    starts = [begun(folder, made, seed, names) for seed, names in enumerate(saved)]
    work = [
        [step(n, [documents(2, seed=10 * seed + n)], lr=1e-2) for n in range(1, 4)]
        for seed in range(3)
    ]
    alone = [train(folder, steps, made, state) for steps, state in zip(work, starts, strict=True)]
    trainer, _ = open_trainer(folder, made, steps=work[0])
    optimizer, seed = made.contract.optimizer, made.contract.seed
    learners = [
        Learner(trainer, state, optimizer, seed, f"learner.{index}")
        for index, state in enumerate(starts)
    ]
    events = [
        [one.take(each) for one, each in zip(learners, turn, strict=True)]
        for turn in zip(*work, strict=True)
    ]
    for index, (state, told) in enumerate(alone):
        assert losses([turn[index] for turn in events]) == losses(told)
        assert_same(learners[index].state(), state)


@pytest.mark.parametrize(
    ("family", "fields", "saved", "shared"),
    [
        ("llama", {}, (), True),
        ("gpt2", {}, (), True),
        ("llama", {"dropout": 0.2}, (), False),
        ("llama", {"method": "dora"}, (), False),
        ("llama", {}, ("model.norm.weight",), False),
    ],
)
def test_learners_in_one_pass_have_the_gradients_of_their_own(tiny, family, fields, saved, shared):
    """Of other ranks and modules, and of the head."""
    folder = tiny(family)
    some = ("q_proj", "down_proj", "lm_head") if family == "llama" else ("c_attn",)
    shapes = [{"rank": 4}, {"rank": 2, "targets": some}, {"targets": ("all-linear",)}]
    trainer, _ = open_trainer(folder, plan(folder, **fields))
    names = ["a", "b", "c"]
    for seed, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        made = plan(folder, **{**fields, **shape})
        trainer.add_learner(name, stirred(begun(folder, made, seed, saved)))
    batches = [batch(documents(count, seed=count)) for count in (1, 3, 2)]
    calls = [(each, 5, name, None) for each, name in zip(batches, names, strict=True)]
    calls[2] = (*calls[2][:3], lambda log_probs_T: np.where(batches[2].scored_T, log_probs_T, 0))

    def gradients(log_probs):
        masters = [trainer._learners[name]._masters for name in names]
        found = [[m.grad.clone().numpy() for m in own.values()] for own in masters]
        for name in names:
            trainer.discard(name)
        return [*log_probs, *itertools.chain(*found)]

    alone = gradients([trainer.accumulate(*call) for call in calls])
    passes = []
    trainer._loss.body = lambda joined, own=trainer._loss.body: passes.append(1) or own(joined)
    together = gradients(trainer.accumulate_all(calls))
    assert bool(passes) == shared
    for one, other in zip(together, alone, strict=True):
        # float32 sums of other blocks of rows
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * np.abs(other).max())


def test_the_base_is_in_memory_once_and_a_removed_learner_is_not(tiny):
    folder, made = tiny("llama"), plan(tiny("llama"))
    trainer, _ = open_trainer(folder, made)
    trainer.add_learner("a", begun(folder, made, 0))
    some, base = batch(documents(3)), trainer.log_probs(batch(documents(3)))
    before = sum(p.nbytes for p in trainer._adapters.base.parameters())
    trainer.add_learner("b", stirred(begun(folder, made, 1)))
    adapter = sum(value.nbytes for value in trainer.state("b").adapter.tensors().values())
    assert sum(p.nbytes for p in trainer._adapters.base.parameters()) == before + adapter
    kept = weakref.ref(trainer._learners["b"]._parameters[0])
    assert np.abs(trainer.log_probs(some, "b") - base).max() > 1e-2
    trainer.remove_learner("b")
    gc.collect()
    assert kept() is None
    assert sum(p.nbytes for p in trainer._adapters.base.parameters()) == before
    np.testing.assert_array_equal(trainer.log_probs(some), base)
    trainer.accumulate(some, 1, "a")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_of_a_model_are_independent(tiny, family, streamed):
    """Of several kinds; each gives the logits that it gives alone."""
    folder = tiny(family)
    states = {}
    for index, method in enumerate(("lora", "dora", "rslora")):
        made = plan(folder, method=method, targets=("all-linear",))
        states[method] = stirred(start(folder, made), size=0.05 * (index + 1)).adapter
    if family == "llama":
        norm = 2 * WeightFolder(folder).read("model.norm.weight").astype(np.float32)
        states["lora"] = replace(states["lora"], saved={"model.norm.weight": norm})
    job = LoadJob(folder, "fp32", streamed=streamed)
    model, expected = load(job, DeviceProfile("cpu")), {}
    plain = model.logits(TOKENS)
    for name, state in states.items():
        alone = load(job, DeviceProfile("cpu"))
        alone.add_adapter(name, state)
        expected[name] = alone.logits(TOKENS, name)
        model.add_adapter(name, state)
    for name in (*states, *reversed(states)):
        np.testing.assert_array_equal(model.logits(TOKENS, name), expected[name])
        np.testing.assert_array_equal(model.logits(TOKENS), plain)
        assert np.abs(expected[name] - plain).max() > 1e-2
    model.remove_adapter("dora")
    np.testing.assert_array_equal(model.logits(TOKENS, "rslora"), expected["rslora"])
    np.testing.assert_array_equal(model.logits(TOKENS), plain)
    model.remove_adapter("lora")
    model.remove_adapter("rslora")
    np.testing.assert_array_equal(model.logits(TOKENS), plain)
    model.add_adapter("lora", states["lora"])
    np.testing.assert_array_equal(model.logits(TOKENS, "lora"), expected["lora"])


def continued(model, adapter, count=6):
    """Greedy tokens behind `TOKENS`."""
    model.insert(7, TOKENS, adapter)
    found = [int(model.advance({})[7].argmax())]
    while len(found) < count:
        found.append(int(model.advance({7: found[-1]})[7].argmax()))
    model.remove(7)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_learner_is_sampled_from_as_it_is_now(tiny, family):
    folder, made = tiny(family), plan(tiny(family))
    trainer, _ = open_trainer(folder, made)
    learner = Learner(trainer, begun(folder, made, 0), made.contract.optimizer, 0, "a")
    base = continued(trainer, "a")
    for number in range(1, 4):
        learner.take(step(number, [documents(4, seed=number)], lr=5e-2))
        model = load(LoadJob(folder, "fp32"), DeviceProfile("cpu"))
        model.add_adapter("now", learner.state().adapter)
        assert continued(trainer, "a") == continued(model, "now")
        assert continued(trainer, None) == continued(model, None) == base
    assert continued(trainer, "a") != base


def test_a_base_that_has_generated_is_trained_alike(tiny):
    """In the same layout and with the same numbers, also where the head is trained whole."""
    folder, made = tiny("llama"), plan(tiny("llama"), targets=("q_proj",))
    found = []
    for generates in (False, True):
        trainer, events = open_trainer(folder, made, steps=[step(1, [documents(2)])])
        if generates:
            continued(trainer, None)
        scores = []
        for name, saved in (("a", ()), ("b", ("lm_head.weight", "model.norm.weight"))):
            trainer.add_learner(name, stirred(begun(folder, made, 0, saved)))
            scores.append(trainer.accumulate(batch(documents(2)), 1, name))
        found.append((type(trainer._loss), [type(each) for each in events], scores))
    (layout, told, scores), (other_layout, other_told, other_scores) = found
    assert (layout, told) == (other_layout, other_told) == (Together, told)
    np.testing.assert_array_equal(scores, other_scores)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen2", {}),  # with biases
        ("gemma3", {"method": "dora"}),
        ("llama", {"targets": ("q_proj", "down_proj")}),
        ("llama", {"method": "full"}),
    ],
)
def test_a_trainer_generates_with_packed_copies(tiny, family, fields):
    """They follow each update, and are freed before documents are computed."""
    if torch.bfloat16 not in faster():
        pytest.skip("needs a processor on which oneDNN multiplies bf16")
    folder, made = tiny(family), plan(tiny(family), dtype="bf16", **fields)
    trainer, _ = open_trainer(folder, made)
    learner = Learner(trainer, start(folder, made), made.contract.optimizer, 0, "a")
    for number in range(1, 4):
        learner.take(step(number, [documents(4, seed=number)], lr=1e-2))
        trainer.insert(7, TOKENS, "a")
        found, expected = trainer.advance({})[7], trainer.logits(TOKENS, "a")[-1]
        trainer.remove(7)
        base, copied = trainer._adapters.base, trainer._by_row._copies
        embedding = base.get_input_embeddings().weight
        expected_copies = {
            layer
            for path, layer in base.named_modules()
            if type(layer) is torch.nn.Linear and "lora_" not in path
            if layer.weight is not embedding
        }
        assert copied.keys() == expected_copies and len(copied) >= 14
        freed = [weakref.ref(each.product) for each in copied.values()]
        distance = relative_distance(torch.tensor(found), torch.tensor(expected))
        assert distance <= tolerance(base)
    gc.collect()
    gc.disable()  # no cycle keeps them
    trainer.log_probs(batch(documents(2)), "a")
    gc.enable()
    assert not [each for each in freed if each() is not None]
    trainer.insert(7, TOKENS, "a")
    trainer.advance({})
    trainer.log_probs(batch(documents(2)), "a")  # a pass between two tokens of an answer
    trainer.advance({7: 5})
    assert not trainer._by_row._copies
    trainer.insert(8, TOKENS, "a")  # while 7 is kept for its prompt
    found = trainer.advance({})[8]
    assert trainer._by_row._copies
    assert relative_distance(torch.tensor(found), torch.tensor(expected)) <= tolerance(base)


def test_an_adapter_of_another_base_is_refused_and_leaves_nothing(tiny):
    model = load(LoadJob(tiny("llama"), "fp32"), DeviceProfile("cpu"))
    plain = model.logits(TOKENS)
    right = stirred(start(tiny("llama"), plan(tiny("llama")))).adapter
    wrong = replace(right, saved={"model.layers.9.norm.weight": np.ones(4, np.float32)})
    strange = start(tiny("gpt2"), plan(tiny("gpt2"))).adapter
    for adapter in (wrong, strange):
        with pytest.raises(AdapterError) as caught:
            model.add_adapter("a", adapter)
        assert caught.value.code == "VOX-A002"
        np.testing.assert_array_equal(model.logits(TOKENS), plain)
    model.add_adapter("a", right)
    assert np.abs(model.logits(TOKENS, "a") - plain).max() > 1e-2
