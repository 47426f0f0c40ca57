"""What MLX's training does beside the numbers: recomputation, compilation, quantised bases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

import vox_mlx.model
from vox_core.contract import ExecutionPlan, LoadJob, TrainJob, World
from vox_core.errors import ModelError
from vox_core.run.learner import Learner
from vox_formats.quant import MLX_FORMATS
from vox_mlx import backend, train
from vox_testing import jobs
from vox_testing.llama import write_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model")


def prepared(made: ExecutionPlan, model: Path, **more: Any) -> tuple[Learner, Mock]:
    """A learner at its start, and what its trainer reports."""
    context = Mock(world=World())
    trainer = backend.vox_train(TrainJob(made, model, **more), context)
    learner = Learner(trainer, jobs.start(model, made), made.contract.optimizer, made.contract.seed)
    return learner, context


def losses(model: Path, *, recompute: bool = False, count: int = 4, **plan: object) -> list[float]:
    made = replace(jobs.plan(model, **plan), gradient_checkpointing=recompute)
    learner, _ = prepared(made, model)
    return [learner.take(step).loss for step in jobs.curve(count, groups=2)]


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_recomputed_activations_change_no_number(model, method):
    given = {"method": method, "dropout": 0.0 if method == "full" else 0.1}
    assert losses(model, recompute=True, **given) == losses(model, **given)


def test_a_model_with_a_weight_that_the_files_lack_is_not_trained_whole(model):
    made = jobs.plan(model, method="full")
    begin = jobs.start(model, made)
    some = {name: value for name, value in begin.adapter.saved.items() if "norm" not in name}
    trainer = backend.vox_train(TrainJob(made, model), Mock(world=World()))
    with pytest.raises(ModelError, match=r"M002[^§]*model.layers.0.input_layernorm.weight"):
        trainer.add_learner("all", replace(begin, adapter=replace(begin.adapter, saved=some)))


def test_recomputed_activations_are_not_kept(model, monkeypatch):
    """Each layer goes through `mx.checkpoint`, once per micro-batch."""
    seen = []
    right = mx.checkpoint
    monkeypatch.setattr(mx, "checkpoint", lambda f: seen.append(f) or right(f))
    losses(model, recompute=True, count=1)
    layers = len({path.split(".")[2] for path in jobs.plan(model).modules})
    assert len(seen) == 2 * layers


def test_on_a_cpu_micro_batches_are_cut_and_no_number_changes(model, monkeypatch):
    calls: dict[str, int] = {}

    def noting(module, name):
        own = getattr(module, name)

        def note(*arguments):
            calls[name] = calls.get(name, 0) + 1
            return own(*arguments)

        monkeypatch.setattr(module, name, note)

    noting(vox_mlx.model, "rows")
    noting(train, "keep_memory")
    monkeypatch.setattr(train, "on_gpu", lambda: False)
    monkeypatch.setattr(vox_mlx.model, "on_gpu", lambda: False)
    whole, before = losses(model), dict(calls)
    calls.clear()
    monkeypatch.setattr(vox_mlx.model, "_ON_CPU", 1)
    assert losses(model) == pytest.approx(whole, rel=1e-5)
    assert calls["rows"] == 2 * before["rows"]  # of batches of two documents
    assert calls["keep_memory"] == 1


def test_a_compiled_step_is_the_same(model, monkeypatch):
    plain = losses(model, count=2, dropout=0.1)
    monkeypatch.setattr(train, "_compiled", mx.compile)
    assert losses(model, count=2, dropout=0.1) == pytest.approx(plain, rel=1e-6)


def test_on_a_gpu_shapes_are_rounded_and_no_number_changes(model, monkeypatch):
    plain = losses(model, count=2)
    shapes = []
    monkeypatch.setattr(vox_mlx.model, "on_gpu", lambda: True)
    monkeypatch.setattr(
        train.MlxTrainer,
        "_nll",
        lambda self, adapter, part, key, own=train.MlxTrainer._nll: (
            shapes.append((part.tokens_NL.shape[1], len(part.index_K)))
            or own(self, adapter, part, key)
        ),
    )
    # Padded rows sum up in another order.
    assert losses(model, count=2) == pytest.approx(plain, rel=1e-5)
    assert all(length % 32 == 0 and scored % 64 == 0 for length, scored in shapes)
    assert len(set(shapes)) < len(shapes) == 4


@pytest.mark.parametrize("quant", sorted(MLX_FORMATS))
def test_a_quantised_base_trains_and_answers(model, quant):
    """tests/parity/test_quantised_training.py has the numbers."""
    assert losses(model, quant=quant) != pytest.approx(losses(model), rel=1e-4)
    loaded = backend.vox_load(LoadJob(model, "fp32", quant=quant), None)
    assert np.isfinite(loaded.logits(np.arange(8))).all()


def test_the_head_and_the_embedding_are_never_quantised(model):
    from mlx import nn

    from vox_mlx.base import load_base

    loaded = load_base(model, "fp32", "affine4")
    packed = {p for p, m in loaded.named_modules() if isinstance(m, nn.QuantizedLinear)}
    assert packed == set(jobs.plan(model).modules)


@pytest.mark.parametrize("quant", sorted(MLX_FORMATS))
def test_unpacked_products_and_gradients_are_those_of_mlxs_kernels(quant):
    from mlx import nn

    from vox_mlx.lora import Unpacked

    group_size, bits, mode = MLX_FORMATS[quant].describe().values()
    packed = nn.QuantizedLinear.from_linear(nn.Linear(128, 64), group_size, bits, mode=mode)
    x = mx.random.normal((2, 16, 128), key=mx.random.key(0))
    results = []
    for kind in (nn.QuantizedLinear, Unpacked):
        packed.__class__ = kind
        y, dx = mx.value_and_grad(lambda x: mx.square(packed(x)).sum())(x)
        results.append((np.array(packed(x)), y.item(), np.array(dx)))
    for mine, other in zip(*results, strict=True):
        # Sums of 128 products in another order: 128^0.5 roundings of 6e-8, and ten times that.
        assert np.linalg.norm(mine - other) < 1e-5 * np.linalg.norm(other)
