"""Dropout of an adapter's inputs: whose mask is whose, and what is computed behind it.

A mask is seen as a user of the module would see it: a layer whose base is zero and whose A and B
are the identity gives its inputs back, dropped or scaled up.

Shape legend: T positions, R rank, I input features, O output features.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

import vox_mlx.model
from vox_core.contract import AdapterState, LowRank, TrainJob, World
from vox_core.run.learner import Learner
from vox_mlx import backend
from vox_mlx.inject import Adapters
from vox_mlx.lora import Adapted
from vox_testing import jobs
from vox_testing.llama import write_llama

RATE = 0.25
# A product of float32 against float64, 16 terms and a rank of 4 summed in another order: 2.4e-7
# measured over seeds, and ten times that.
FLOAT32 = 3e-6


class Pair(nn.Module):
    """Two linear layers side by side, which is model enough to inject into."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.layers: list[nn.Module] = []


def pair(
    make: LowRank, weights: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[Pair, Adapters]:
    """Both layers with the adapter `make`; without weights the base is zero."""
    rows, columns = len(make.B_OR), make.A_RI.shape[1]
    linears = []
    for _ in range(2):
        W_OI, bias_O = weights or (np.zeros((rows, columns)), np.zeros(rows))
        linear = nn.Linear(columns, rows)
        linear.weight, linear.bias = mx.array(W_OI, mx.float32), mx.array(bias_O, mx.float32)
        linears.append(linear)
    method = "lora" if make.magnitude_O is None else "dora"
    state = AdapterState(method, {"first": make, "second": make})
    model = Pair(*linears)
    adapters = Adapters(model, "llama", mx.float32, RATE)
    adapters.add("adapter", state)
    adapters.choose(["adapter"])
    return model, adapters


def masks(width: int, key: int | None, length: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """What becomes of ones in each of two layers, in one micro-batch: two arrays (T, I)."""
    identity = np.eye(width, dtype=np.float32)
    model, adapters = pair(LowRank(identity, identity, float(width)))
    adapters.dropout.begin(None if key is None else mx.random.key(key), 2)
    ones_1TI = mx.ones((1, length, width))
    return tuple(np.array(module(ones_1TI))[0] for module in (model.first, model.second))


def test_what_is_kept_is_scaled_up_and_as_much_as_the_rate_says():
    first_TI, second_TI = masks(256, key=0, length=256)
    for mask_TI in (first_TI, second_TI):
        # Exact but for one rounding of the division.
        assert np.unique(mask_TI).tolist() == pytest.approx([0, 1 / (1 - RATE)], rel=1e-6)
        # The share of 65536 draws: a standard deviation of (0.25 * 0.75 / 65536)^0.5 = 0.0017.
        assert (mask_TI > 0).mean() == pytest.approx(1 - RATE, abs=0.008)
        # No stripes: 0.027 for the 256 draws of a row or a column, and five times that.
        assert abs((mask_TI > 0).mean(0) - (1 - RATE)).max() < 0.14
        assert abs((mask_TI > 0).mean(1) - (1 - RATE)).max() < 0.14


def test_two_layers_of_a_micro_batch_have_masks_of_their_own():
    first_TI, second_TI = masks(64, key=0)
    # Independent masks agree in 0.25^2 + 0.75^2 = 0.625 of 4096 places, within 0.0076.
    assert (first_TI == second_TI).mean() == pytest.approx(0.625, abs=0.04)


def test_a_key_is_a_micro_batchs_mask():
    first_TI, second_TI = masks(64, key=0)
    again_TI, _ = masks(64, key=0)
    assert np.array_equal(first_TI, again_TI)
    for other_TI in masks(64, key=1):
        assert (first_TI == other_TI).mean() == pytest.approx(0.625, abs=0.04)
        assert (second_TI == other_TI).mean() == pytest.approx(0.625, abs=0.04)


def test_without_a_key_nothing_is_dropped():
    for mask_TI in masks(64, key=None):
        assert (mask_TI == 1).all()


# --- with what PEFT computes ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_the_formula_and_its_gradients_are_pefts(method):
    """Against float64, with the very masks; for DoRA the norm is a constant to the gradient."""
    draw = np.random.default_rng(3).standard_normal
    W_OI, bias_O, x_TI = draw((12, 16)), draw(12), draw((7, 16))
    A_RI, B_OR, m_O = draw((4, 16)), draw((12, 4)), 1 + draw(12) ** 2
    upstream_TO = draw((7, 12))
    magnitude = m_O.astype(np.float32) if method == "dora" else None
    make = LowRank(A_RI.astype(np.float32), B_OR.astype(np.float32), 8.0, magnitude)
    model, adapters = pair(make, (W_OI, bias_O))
    scale = 2.0  # alpha 8, rank 4

    kept = masks(16, key=5, length=7)
    for module, mask_TI in zip((model.first, model.second), kept, strict=True):
        drop_TI = np.where(mask_TI > 0, x_TI / (1 - RATE), 0)
        gain_O = np.ones(12)
        if method == "dora":
            norm_O = np.linalg.norm(W_OI + scale * B_OR @ A_RI, axis=1)
            gain_O = m_O / norm_O
        update_TO = scale * drop_TI @ A_RI.T @ B_OR.T
        plain_TO = drop_TI @ W_OI.T
        y_TO = x_TI @ W_OI.T + bias_O + (gain_O - 1) * plain_TO + gain_O * update_TO
        through_TO = scale * gain_O * upstream_TO
        expected = {
            "lora_A": (through_TO @ B_OR).T @ drop_TI,
            "lora_B": through_TO.T @ (drop_TI @ A_RI.T),
        }
        if method == "dora":
            expected["magnitude"] = (upstream_TO * (plain_TO + update_TO)).sum(0) / norm_O

        adapters.dropout.begin(mx.random.key(5), 2)
        mine, gradients = outputs_and_gradients(module, x_TI, upstream_TO, list(expected))
        assert apart(mine, y_TO) < FLOAT32
        for name, gradient in expected.items():
            assert apart(gradients[name], gradient) < FLOAT32, name


def outputs_and_gradients(
    module: Adapted, x_TI: np.ndarray, upstream_TO: np.ndarray, names: list[str]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The outputs for `x_TI`, and the gradients of their sum weighted by `upstream_TO`."""
    x_1TI = mx.array(x_TI[None], mx.float32)

    def weighted(values: dict[str, mx.array]) -> mx.array:
        for name, value in values.items():
            setattr(lora, name, value)
        return (module(x_1TI) * mx.array(upstream_TO, mx.float32)).sum()

    lora = module.adapters["adapter"]
    values = {name: getattr(lora, name) for name in names}
    gradients = mx.grad(weighted)(values)
    for name, value in values.items():
        setattr(lora, name, value)
    return np.array(module(x_1TI))[0], {n: np.array(g) for n, g in gradients.items()}


def apart(mine: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(mine - exact) / np.linalg.norm(exact))


# --- in a run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("dropout") / "model")


def still(model: Path, groups: list[int], dropout: float) -> list[float]:
    """Losses of steps that move nothing, from an adapter with an effect.

    Args:
        groups: for each step, how often the same documents come as a micro-batch.
    """
    learner = learner_of(model, dropout)
    some = jobs.documents(2)
    steps = [jobs.step(n, [some] * count, lr=0.0) for n, count in enumerate(groups, 1)]
    return [learner.take(step).loss for step in steps]


def learner_of(model: Path, dropout: float) -> Learner:
    made = jobs.plan(model, dropout=dropout)
    trainer = backend.vox_train(TrainJob(made, model), Mock(world=World()))
    start = jobs.stirred(jobs.start(model, made), size=0.2)
    return Learner(trainer, start, made.contract.optimizer, made.contract.seed)


def test_each_step_and_each_micro_batch_has_masks_of_its_own(model):
    one, other = still(model, [1, 1], 0.5)
    assert one != pytest.approx(other, rel=1e-4)
    (two,) = still(model, [2], 0.5)
    # The first micro-batch of both runs is the same; a second with its masks would change nothing.
    assert two != pytest.approx(one, rel=1e-4)
    assert still(model, [1, 1], 0.5) == [one, other]
    whole, again = still(model, [1, 1], 0.0)
    assert whole == again


def test_the_parts_of_a_batch_have_masks_of_their_own(model, monkeypatch):
    """The same document twice, in a part of its own each time."""
    monkeypatch.setattr(vox_mlx.model, "_ON_CPU", 1)
    some = jobs.batch(jobs.documents(1) * 2)
    trainer = learner_of(model, 0.5)._trainer
    first_T, second_T = np.split(trainer.log_probs(some, "adapter", seed=3), 2)
    assert not np.allclose(first_T, second_T, rtol=1e-4)


def test_nothing_is_dropped_in_evaluation(model):
    batches = [jobs.batch(jobs.documents(2, seed=9))]
    assert learner_of(model, 0.5).evaluate(batches) == learner_of(model, 0.0).evaluate(batches)
