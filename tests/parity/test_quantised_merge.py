"""A quantised run of the MLX backend, merged: how far what was written is from what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlx_lm import convert

from tests.parity import held, mlx_models, tolerances
from tests.parity.held import apart
from vox_core.config import MergeSettings, TrainSettings, validate
from vox_core.run.hf_checkpoint import plain_copy
from vox_core.run.merge import merge
from vox_core.run.train import train
from vox_core.weights import WeightFolder, open_weights
from vox_formats.mlx_model import mlx_config
from vox_mlx.base import read_config
from vox_testing import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("quantised"), "llama")


def train_run(root: Path, family: str) -> Path:
    """Five float32 steps on a bfloat16 base, quantised to four bits."""
    known = tiny.MIXTURES if family in tiny.MIXTURES else tiny.FAMILIES
    with pytest.MonkeyPatch.context() as patch:
        wide = {**known[family][1], "hidden_size": 64, "head_dim": 16}
        patch.setitem(known, family, (family, wide))
        base = tiny.make_model(family, root / "base", dtype="bfloat16")
    return on_mlx(base, root, quant="affine4")


def on_mlx(base: Path, root: Path, **more: str) -> Path:
    """Five steps in float32."""
    rows = [json.dumps({"prompt": f"{n}?", "completion": f"It is {n * n}."}) for n in range(8)]
    (root / "train.jsonl").write_text("\n".join(rows))
    given = {"model": str(base), "data": [root / "train.jsonl"], "out": root / "run", **more}
    how = {"backend": "mlx", "dtype": "fp32", "max_steps": 5, "lr": 1e-2}
    return train(validate(TrainSettings, {**given, **how, "batch_size": 2})).run


@pytest.mark.parametrize("quant", ["none", "affine4"])
def test_onto_the_trained_base_in_float32_it_is_what_was_trained(run, tmp_path, quant):
    settings = MergeSettings(
        out=tmp_path / "merged", onto="trained-base", dtype="fp32", quant=quant
    )
    assert merge(str(run), settings).proof.from_trained < tolerances.LOGITS


def test_onto_the_base_the_noise_of_the_quantisation_is_told(run, tmp_path):
    proof = merge(str(run), MergeSettings(out=tmp_path / "merged", dtype="fp32")).proof
    assert proof.relative < proof.tolerance
    assert proof.from_trained > 100 * tolerances.LOGITS


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_so_is_a_mixture_of_experts(tmp_path, family):
    """The proof computes with the backend that trained."""
    run = train_run(tmp_path, family)
    settings = MergeSettings(
        out=tmp_path / "merged", onto="trained-base", dtype="fp32", backend="mlx"
    )
    assert merge(str(run), settings).proof.from_trained < tolerances.LOGITS
    proof = merge(str(run), MergeSettings(out=tmp_path / "onto", dtype="fp32")).proof
    assert proof.from_trained > 100 * tolerances.LOGITS


@pytest.mark.parametrize("family", ["glm4_moe", "mixtral", "qwen3_moe"])
def test_a_mixture_that_mlx_lm_quantised_is_trained_and_merged(tmp_path, family):
    """Trained with its experts as they are packed; the merged model has them one by one again."""
    base = mlx_models.make(family, tmp_path / "base")
    tiny.write_tokenizer(base)
    config = mlx_config(read_config(base))  # settings as mlx-lm reads them
    (base / "config.json").write_text(json.dumps(config))
    packed = tmp_path / "packed"
    convert(str(base), str(packed), quantize=True, q_group_size=32, dtype="float32")
    weights = open_weights(packed)
    with plain_copy(weights, tmp_path / "copy") as plain:
        assert apart(held.logits("mlx", packed), held.logits("cpu", plain)) < tolerances.LOGITS
    run = on_mlx(packed, tmp_path)
    proof = merge(str(run), MergeSettings(out=tmp_path / "merged", backend="cpu")).proof
    assert proof.relative < proof.tolerance
    assert proof.carried == pytest.approx(1, abs=1e-3)
    assert WeightFolder(tmp_path / "merged").tensors.keys() == weights.tensors.keys()
