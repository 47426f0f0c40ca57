"""`vox.open_trainer` on the CPU backend, and its adapters in `vox.load`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import vox_core as vox
from tests.run.test_open_trainer import ROWS, interleaved, one_by_one, tensors

SETTINGS = {"backend": "cpu", "dtype": "fp32", "rank": 4, "alpha": 8, "lr": 1e-2, "dropout": 0.1}


@pytest.fixture(scope="module")
def base(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


def test_a_loop_learns_samples_and_is_loaded(base: Path, tmp_path: Path) -> None:
    with vox.open_trainer(base, **SETTINGS) as trainer:
        losses = []
        for _ in range(4):
            losses.append(trainer.forward_backward(ROWS).loss)
            assert trainer.optim_step() > 0
        assert losses == sorted(losses, reverse=True)
        samples = trainer.sample(["How do I merge?", "Talk?"], n=2, max_tokens=5)
        for sample, scores_K in zip(samples, trainer.log_probs(samples), strict=True):
            # With a KV cache and without: the same sums in another order, in float32.
            np.testing.assert_allclose(sample.log_probs, scores_K, atol=1e-4)
        trainer.forward_backward(samples, weights=[1.0, -1.0, 0.5, -0.5])
        assert trainer.optim_step() > 0
        saved = trainer.save(tmp_path / "saved")
        said = trainer.sample("How do I merge?", temperature=0, max_tokens=8)[0].text
    with vox.load(saved, backend="cpu", dtype="fp32", max_tokens=8) as model:
        assert model.title.endswith("+ adapter")
        assert model.generate("How do I merge?") == said


def test_interleaved_learners_are_what_they_are_alone(base: Path) -> None:
    together: dict[str, list[float]] = {}
    apart: dict[str, list[float]] = {}
    with vox.open_trainer(base, **SETTINGS) as opened:
        found = interleaved(opened, together, alone=False)
    assert found == one_by_one(base, apart, **SETTINGS), "bit for bit"
    assert together == apart


def test_a_state_goes_on_bit_for_bit(base: Path, tmp_path: Path) -> None:
    with vox.open_trainer(base, **SETTINGS) as trainer:
        trainer.forward_backward(ROWS)
        trainer.optim_step()
        trainer.save_state(tmp_path)
        trainer.forward_backward(ROWS)
        trainer.optim_step()
        expected = tensors(trainer)
        trainer.load_state(tmp_path)
        trainer.forward_backward(ROWS)
        trainer.optim_step()
        assert tensors(trainer) == expected
