"""Language models beside a vision tower: MLX against torch on the CPU, in text alone.

The tower is left out of what is loaded for text; names, and settings that such a configuration has
twice, are what can go wrong.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.parity import held, tolerances
from tests.parity.held import apart
from tests.run.test_multimodal import make

STEPS = 5


@pytest.fixture(scope="module", params=["gemma3", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param
    return make(family, tmp_path_factory.mktemp("composite"), held.SPREAD.get(family))


def test_the_bases_logits(folder):
    assert apart(held.logits("mlx", folder), held.logits("cpu", folder)) < tolerances.LOGITS


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_the_loss_at_each_step(folder, method):
    mine, other = (held.train(b, folder, STEPS, method=method) for b in ("mlx", "cpu"))
    assert len(mine.losses) == STEPS
    assert mine.losses == pytest.approx(other.losses, rel=tolerances.LOSS)
    assert mine.norms == pytest.approx(other.norms, rel=tolerances.GRADIENT_NORM)
    assert mine.losses[0] != pytest.approx(mine.losses[-1], rel=1e-3)


def test_gemma3_under_the_names_that_transformers_has_in_memory(tmp_path):
    """Its files have older names, unless somebody wrote the state dict as it is."""
    folder = make("gemma3", tmp_path / "files")
    renamed = shutil.copytree(folder, tmp_path / "memory")
    tensors = load_file(folder / "model.safetensors")
    own = {f"model.{_in_memory(name)}": value for name, value in tensors.items()}
    assert own.keys().isdisjoint(tensors)
    save_file(own, renamed / "model.safetensors", {"format": "pt"})
    assert apart(held.logits("mlx", renamed), held.logits("cpu", folder)) < tolerances.LOGITS


def _in_memory(name: str) -> str:
    return name.replace("language_model.model.", "language_model.", 1)
