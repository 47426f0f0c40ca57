"""Gradients of the whole model, documents, dropout, learners, and AdamW against torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vox_core.adapter.initial import generator
from vox_core.contract import AdapterState, Batch, Method, TrainState, Update
from vox_core.errors import AdapterError
from vox_numpy.config import Llama
from vox_numpy.trainer import NumpyTrainer
from vox_testing.jobs import batch, documents, plan, start, stirred
from vox_testing.llama import write_llama

SEED = 11
# Central differences with steps of 1e-5 along a direction, in float64, relative. Seen: 2e-9.
STEP, SLOPE = 1e-5, 1e-6
# One sum in another order, in float64.
ROUNDOFF = 1e-12
DROPOUT = 0.3
SAVED = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.0.mlp.up_proj.weight",
    "lm_head.weight",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("numpy") / "model")


def state(folder: Path, method: Method = "lora", saved: tuple[str, ...] = ()) -> TrainState:
    """An adapter of all linear modules and the head, with an effect."""
    made = stirred(start(folder, plan(folder, method=method, targets=("all-linear", "lm_head"))))
    whole = {name: np.array(Llama(folder).weight(name)) for name in saved}
    return replace(made, adapter=replace(made.adapter, saved=whole))


def trainer(folder: Path, *states: TrainState, **options: Any) -> NumpyTrainer:
    """A trainer in float64 with learners "0", "1", …"""
    settings = {"dropout": 0.0, "recompute": False, **options}
    made = NumpyTrainer(Llama(folder, np.float64), **settings)
    for number, each in enumerate(states):
        made.add_learner(str(number), each)
    return made


def signed() -> Batch:
    """Three documents with weights of both signs."""
    made = batch(documents(3, seed=5, uneven=True))
    signs = np.where(np.arange(len(made.weights_T)) % 3 == 0, -1, 1).astype(np.float32)
    return replace(made, weights_T=made.weights_T * signs)


def gradients(made: NumpyTrainer, learner: str = "0") -> dict[str, Any]:
    return dict(made._adapters[learner].gradients)


def loss(made: NumpyTrainer, some: Batch) -> float:
    """In float64, as the scores are before they are rounded."""
    return -float(some.weights_T @ made._scores(some, "0", SEED)[0])


@pytest.mark.parametrize(
    ("method", "saved"), [("lora", ()), ("rslora", ()), ("lora", SAVED), ("dora", ())]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_slopes(
    folder: Path, method: Method, saved: tuple[str, ...], recompute: bool
) -> None:
    """Of each tensor, along a random direction, with dropout. DoRA's norm is a constant to the
    gradient, so that of its A and B is no slope, and is tested by itself."""
    made = trainer(folder, state(folder, method, saved), dropout=DROPOUT, recompute=recompute)
    made.accumulate(signed(), SEED, "0")
    values = made._adapters["0"].values
    assert gradients(made).keys() == values.keys()
    for name, gradient in gradients(made).items():
        if method == "dora" and "magnitude" not in name:
            continue
        direction, value = generator(name).standard_normal(gradient.shape), values[name]
        sides = []
        for sign in (1, -1):
            values[name] = value + sign * STEP * direction
            sides.append(loss(made, signed()))
        values[name] = value
        slope = (sides[0] - sides[1]) / (2 * STEP)
        size = float(np.linalg.norm(gradient) * np.linalg.norm(direction))
        assert float((gradient * direction).sum()) == pytest.approx(slope, abs=SLOPE * size), name


def test_documents_do_not_see_one_another(folder: Path) -> None:
    some = documents(3, seed=5)
    made = trainer(folder, state(folder))
    together = made.log_probs(batch(some), "0")
    alone = [made.log_probs(batch([one]), "0") for one in some]
    assert np.array_equal(together, np.concatenate(alone))


def test_gradients_add_up_over_any_cut(folder: Path) -> None:
    some = documents(4, seed=5, uneven=True)
    whole, cut = (trainer(folder, state(folder)) for _ in range(2))
    whole.accumulate(batch(some), SEED, "0")
    for part in (some[:1], some[1:]):
        cut.accumulate(batch(part), SEED, "0")
    for name, gradient in gradients(whole).items():
        size = np.abs(gradient).max()
        np.testing.assert_allclose(gradients(cut)[name], gradient, atol=ROUNDOFF * size)


def test_dropout_is_a_function_of_the_seed(folder: Path) -> None:
    made = trainer(folder, state(folder), dropout=DROPOUT)
    scored = made.log_probs(signed(), "0", SEED)
    assert np.array_equal(made.accumulate(signed(), SEED, "0"), scored)
    for other in (SEED + 1, None):
        assert not np.allclose(made.log_probs(signed(), "0", other), scored, atol=1e-3)


def test_weigh_replaces_the_weights(folder: Path) -> None:
    """It is called once, with the log-probabilities that are returned."""
    given, weighed = (trainer(folder, state(folder)) for _ in range(2))
    some, seen = signed(), []
    expected_T = given.accumulate(some, SEED, "0")

    def weigh(log_probs_T: Any) -> Any:
        seen.append(log_probs_T.copy())
        return some.weights_T

    ones = replace(some, weights_T=(some.weights_T != 0).astype(np.float32))
    assert np.array_equal(weighed.accumulate(ones, SEED, "0", weigh), expected_T)
    assert len(seen) == 1 and np.array_equal(seen[0], expected_T)
    for name, gradient in gradients(given).items():
        assert np.array_equal(gradients(weighed)[name], gradient)


def test_positions_that_are_scored_only_are_not_trained(folder: Path) -> None:
    made, plain = (trainer(folder, state(folder)) for _ in range(2))
    some = signed()
    every_T = np.ones(len(some.tokens_T), bool)
    found_T = made.accumulate(replace(some, scored_T=every_T), SEED, "0")
    expected_T = plain.accumulate(some, SEED, "0")
    assert (found_T != 0).all() and (expected_T[~some.scored_T] == 0).all()
    np.testing.assert_allclose(found_T[some.scored_T], expected_T[some.scored_T], rtol=1e-6)
    for name, gradient in gradients(plain).items():
        size = np.abs(gradient).max()
        np.testing.assert_allclose(gradients(made)[name], gradient, atol=ROUNDOFF * size)


@pytest.mark.parametrize("clip", [0.0, 1e-2, 1e6])
def test_updates_are_torchs(folder: Path, clip: float) -> None:
    """Norm, clipping and AdamW of three updates, from torch's own in float64."""
    torch = pytest.importorskip("torch")
    made = trainer(folder, state(folder))
    learner = made._adapters["0"]
    values = {name: torch.tensor(value) for name, value in learner.values.items()}
    adamw = torch.optim.AdamW(
        values.values(), lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1
    )
    for number in (1, 2, 3):
        made.accumulate(signed(), number, "0")
        for name, value in values.items():
            value.grad = torch.tensor(learner.gradients[name] / 7.0)
        norm = torch.nn.utils.clip_grad_norm_(values.values(), clip or float("inf"))
        adamw.step()
        update = Update(number, 1e-2, 7.0, clip, 0.8, 0.95, 1e-3, 0.1)
        assert made.update(update, "0") == pytest.approx(float(norm), rel=ROUNDOFF)
    for name, value in values.items():
        np.testing.assert_allclose(learner.values[name], value.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("forget", ["update", "discard"])
def test_gradients_are_forgotten(folder: Path, forget: str) -> None:
    calls: dict[str, Callable[[NumpyTrainer], object]] = {
        "update": lambda made: made.update(Update(1, 0.0, 1.0), "0"),
        "discard": lambda made: made.discard("0"),
    }
    made = trainer(folder, state(folder))
    made.accumulate(signed(), SEED, "0")
    calls[forget](made)
    assert made.update(Update(1, 0.0, 1.0), "0") == 0


def test_a_norm_that_is_not_finite_changes_nothing(folder: Path) -> None:
    made = trainer(folder, state(folder))
    before = made.state("0")
    weights_T = np.where(signed().weights_T != 0, np.inf, 0).astype(np.float32)
    made.accumulate(replace(signed(), weights_T=weights_T), SEED, "0")
    assert not np.isfinite(made.update(Update(1, 1e-2, 1.0, clip=1.0), "0"))
    after = made.state("0")
    assert (after.step, dict(after.moments)) == (0, {})
    for name, value in before.adapter.tensors().items():
        assert np.array_equal(after.adapter.tensors()[name], value)
    made.accumulate(signed(), SEED, "0")
    assert np.isfinite(made.update(Update(1, 1e-2, 1.0), "0"))


def test_learners_do_not_touch_one_another(folder: Path) -> None:
    """Interleaved, each has what it has alone; they share the base."""

    def step(made: NumpyTrainer, number: int, name: str) -> None:
        made.accumulate(signed(), number, name)
        made.update(Update(number, 1e-2, 1.0), name)

    states = [state(folder), state(folder, "dora")]
    both = trainer(folder, *states, dropout=DROPOUT)
    for number in (1, 2):
        for name in ("0", "1"):
            step(both, number, name)
    alone = trainer(folder, states[1], dropout=DROPOUT)
    for number in (1, 2):
        step(alone, number, "0")
    expected = alone.state("0").adapter.tensors()
    for name, value in both.state("1").adapter.tensors().items():
        assert np.array_equal(value, expected[name])
    both.remove_learner("0")
    with pytest.raises(KeyError):
        both.log_probs(signed(), "0")


def test_a_state_is_a_copy_that_goes_on(folder: Path) -> None:
    made = trainer(folder, state(folder))
    made.accumulate(signed(), 1, "0")
    made.update(Update(1, 1e-2, 1.0), "0")
    kept = made.state("0")
    values = {name: value.copy() for name, value in kept.adapter.tensors().items()}
    resumed = NumpyTrainer(Llama(folder), dropout=0.0, recompute=False)
    resumed.add_learner("0", kept)
    whole = NumpyTrainer(Llama(folder), dropout=0.0, recompute=False)
    whole.add_learner("0", kept)
    for each in (whole, resumed):
        each.accumulate(signed(), 2, "0")
        each.update(Update(2, 1e-2, 1.0), "0")
    assert kept.step == 1 and whole.state("0").step == 2
    for name, value in values.items():
        assert np.array_equal(kept.adapter.tensors()[name], value)
        assert np.array_equal(
            whole.state("0").adapter.tensors()[name], resumed.state("0").adapter.tensors()[name]
        )


def test_an_adapter_of_another_model_is_refused(folder: Path) -> None:
    adapter = state(folder).adapter
    moved = {path.replace("layers.0", "layers.9"): one for path, one in adapter.modules.items()}
    made = trainer(folder)
    with pytest.raises(AdapterError):
        made.add_adapter("other", AdapterState("lora", moved))
