"""A mixture of experts is quantised by nobody: what quantises leaves the experts as they are."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from vox_core.config import GenerateSettings
from vox_core.errors import PlanError
from vox_core.host import Seen
from vox_core.run.load import open_model
from vox_core.run.plan import require_no_experts
from vox_core.run.train import train
from vox_export.requantise import requantise, require_quantisable
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
    require_no_experts("none", config, shaped(**tensors))
    with pytest.raises(PlanError) as caught:
        require_no_experts("nf4", config, shaped(**tensors))
    assert caught.value.code == "VOX-P001"
    assert found in caught.value.found


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
    require_no_experts("affine4", config, shaped(**tensors))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama") / "dense", dtype="BF16")


def with_experts(base: Path, folder: Path) -> Path:
    """The base, with a configuration that tells of experts."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 4}))
    return folder


def test_training_and_chatting_refuse_before_they_load(dense, settings, tmp_path, monkeypatch):
    # The CPU backend passes for one that has the quantisation.
    real = Seen.select
    monkeypatch.setattr(
        Seen, "select", lambda seen, request: real(seen, replace(request, quant=None))
    )
    experts = with_experts(dense, tmp_path / "experts")
    with pytest.raises(PlanError, match="mixture of experts"):
        train(settings(experts, quant="affine4"))
    with (
        pytest.raises(PlanError, match="mixture of experts"),
        open_model(str(experts), GenerateSettings(quant="affine4")),
    ):
        pass


def test_a_folder_that_is_quantised_already_is_refused_too(dense, settings, tmp_path):
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    requantise(dense, quantised, "affine4")
    with pytest.raises(PlanError, match="mixture of experts"):
        train(settings(with_experts(quantised, tmp_path / "experts")))


def test_a_merged_model_is_not_written_so(dense, tmp_path):
    experts = with_experts(dense, tmp_path / "experts")
    with pytest.raises(PlanError, match="mixture of experts"):
        require_quantisable(experts, "affine4")
