"""Mixtures of experts: how they are known, what is quantised of them, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass

import pytest

from vox_core.adapter.targets import quantised_modules
from vox_core.errors import ModelError, PlanError
from vox_core.run.plan import find_experts
from vox_core.run.train import train
from vox_export.requantise import require_quantisable
from vox_testing.llama import write_llama


@dataclass(frozen=True)
class Shaped:
    shape: tuple[int, ...]


def shaped(**others: tuple[int, ...]) -> dict[str, Shaped]:
    """Tensors of a dense model, and `others`."""
    dense = {"model.layers.0.self_attn.q_proj.weight": (64, 64)}
    return {name: Shaped(shape) for name, shape in {**dense, **others}.items()}


@pytest.mark.parametrize(
    ("config", "tensors", "found"),
    [
        ({"num_experts": 4}, {}, "num_experts = 4 in config.json"),
        ({"num_local_experts": 8}, {}, "num_local_experts = 8 in config.json"),
        ({"text_config": {"n_routed_experts": 2}}, {}, "n_routed_experts = 2 in config.json"),
        ({}, {"model.layers.0.mlp.experts.3.up_proj.weight": (8, 4)}, "experts.3"),
        ({}, {"model.layers.0.mlp.experts.gate_up_proj": (4, 64, 64)}, "[4, 64, 64]"),
        ({}, {"model.layers.0.moe.input_linear.weight": (4, 64, 64)}, "[4, 64, 64]"),
    ],
)
def test_experts_are_found_in_the_configuration_and_in_the_files(config, tensors, found):
    assert found in str(find_experts(config, shaped(**tensors)))


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        ({"num_experts": 0, "num_experts_per_tok": 2, "num_local_experts": None}, {}),
        ({}, {"model.layers.0.linear_attn.conv1d.weight": (48, 1, 4)}),
        ({}, {"model.encoder.conv1.weight": (64, 80, 3)}),
        ({}, {"visual.pos_embed": (1, 64, 64), "visual.patch_embed.weight": (8, 3, 2, 2)}),
    ],
)
def test_what_is_dense_passes(config, tensors):
    assert find_experts(config, shaped(**tensors)) is None


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("qwen3_moe", "mlp.experts.0.up_proj.weight", (96, 64)),
        ("qwen3_moe", "mlp.experts.up_proj", (4, 96, 64)),
        ("gpt_oss", "mlp.experts.gate_up_proj", (4, 64, 96)),
    ],
)
def test_experts_are_quantised_and_what_decides_between_them_is_not(family, name, shape):
    path = f"model.layers.0.{name}"
    others = {"model.layers.0.mlp.gate.weight": (4, 64), "lm_head.weight": (260, 64)}
    tensors = shaped(**{path: shape}, **others)
    assert not quantised_modules(tensors, family, "none")
    reached = quantised_modules(tensors, family, "affine4")
    assert {each.tensor: each.in_features for each in reached.values()} == {
        "model.layers.0.self_attn.q_proj.weight": 64,
        path: 64,
    }


def test_experts_that_a_format_does_not_fit_are_named(tiny, settings):
    with pytest.raises(PlanError) as caught:
        train(settings(tiny("mixtral"), backend="mlx", quant="affine4"))
    assert caught.value.code == "VOX-P001"
    assert any("mlp.experts.3.w1: 32 input features" in fault for fault in caught.value.faults)


def test_a_merged_model_is_not_written_so(tmp_path):
    experts = shutil.copytree(write_llama(tmp_path / "dense", dtype="BF16"), tmp_path / "experts")
    config = json.loads((experts / "config.json").read_text())
    (experts / "config.json").write_text(json.dumps({**config, "num_local_experts": 4}))
    with pytest.raises(ModelError, match="mixture of experts"):
        require_quantisable(experts, "affine4")
