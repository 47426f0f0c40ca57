"""A quantised mixture of experts on MLX: its weights are those of the reference to the bit, and
training on them is training on a plain model that has them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from tests.parity import held, mlx_models, tolerances
from tests.parity.held import distance
from vox_core.adapter.targets import quantised_modules
from vox_core.errors import ModelError
from vox_core.run.hf_checkpoint import as_trained, plain_copy
from vox_core.weights import WeightFolder
from vox_formats.quant import MLX_FORMATS
from vox_mlx.base import load_base
from vox_testing import jobs

STEPS = 5
quants = pytest.mark.parametrize("quant", MLX_FORMATS)
# Stored one by one below a dense layer; as turned stacks; as stacks of gate and up; one by one
# under another block's name; beside a shared expert.
FAMILIES = ("glm4_moe", "gpt_oss", "granitemoe", "mixtral", "qwen2_moe")


@pytest.fixture(params=FAMILIES, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def make(family: str, folder: Path) -> Path:
    """A tiny model whose experts are as wide as a group of every format."""
    wide = "moe_intermediate_size" in mlx_models.OWN[family]
    return mlx_models.make(family, folder, **({"moe_intermediate_size": 64} if wide else {}))


def seen(folder: Path, quant: str, dtype: str, beside: Path):
    """A plain folder of the weights that the quantisation leaves."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    return plain_copy(as_trained(WeightFolder(folder), quant, family, dtype), beside / "copy")


@quants
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_quantised_weight_is_the_references(folder, tmp_path, quant, dtype, monkeypatch):
    monkeypatch.setattr("vox_mlx.base._require_product", lambda *_: None)  # nothing is computed
    with seen(folder, quant, dtype, tmp_path) as copy:
        expected = dict(tree_flatten(load_base(copy, dtype).parameters()))
    model, elements = load_base(folder, dtype, quant), 0
    for path, module in model.named_modules():
        if not isinstance(module, nn.QuantizedLinear | QuantizedSwitchLinear):
            continue
        form = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        parts = module.weight, module.scales, module.get("biases")
        W = mx.dequantize(*parts, **form, dtype=expected[f"{path}.weight"].dtype)
        assert mx.array_equal(W, expected[f"{path}.weight"]), path
        elements += W.size
    tensors = WeightFolder(folder).tensors
    reached = quantised_modules(tensors, model.model_type, quant).values()
    assert elements == sum(math.prod(tensors[each.tensor].shape) for each in reached)


@quants
@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe"])
def test_five_steps_are_those_on_the_dequantised_weights(tmp_path, family, quant):
    folder = make(family, tmp_path / family)
    steps = jobs.curve(STEPS, groups=2)
    with seen(folder, quant, "fp32", tmp_path) as copy:
        start = jobs.start(copy, jobs.plan(copy))
        other = held.go_on("cpu", copy, start, steps)
    mine = held.go_on("mlx", folder, start, steps, quant=quant)
    assert mine.losses == pytest.approx(other.losses, rel=tolerances.LOSS)
    assert mine.norms == pytest.approx(other.norms, rel=tolerances.GRADIENT_NORM)
    ends = [each.state.adapter.tensors() for each in (mine, other)]
    assert distance(*ends) < tolerances.ADAPTER
    assert mine.losses != pytest.approx(held.go_on("cpu", folder, start, steps).losses, rel=1e-4)


def test_experts_that_groups_do_not_fit_are_named(tmp_path):
    folder = mlx_models.make("qwen3_moe", tmp_path)  # 32 wide
    with pytest.raises(ModelError, match=r"experts\.0\.down_proj: 32 input features") as caught:
        load_base(folder, "fp32", "affine4")
    assert caught.value.code == "VOX-M002"


def test_latents_that_mlx_lm_splits_are_not_quantised(tmp_path):
    folder = mlx_models.make("deepseek_v3", tmp_path, moe_intermediate_size=64)
    with pytest.raises(ModelError, match=r"kv_b_proj: mlx-lm's model has no such module"):
        load_base(folder, "fp32", "mxfp4")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_experts_in_sixteen_bits_are_refused_on_a_cpu(tmp_path, dtype):
    if mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("MLX computes on a GPU here")
    folder = make("mixtral", tmp_path)
    with pytest.raises(ModelError, match=r"float32 alone"):
        load_base(folder, dtype)
    logits = load_base(folder, dtype, "affine4")(mx.array(mlx_models.TOKENS_T)[None])
    assert mx.isfinite(logits).all()
