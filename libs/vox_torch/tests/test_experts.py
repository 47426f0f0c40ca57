"""Mixtures of experts: what is read expert by expert, and documents end to end."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vox_core.adapter.targets import linear_modules
from vox_core.errors import ModelError
from vox_core.weights import WeightFolder
from vox_testing.tiny import MIXTURES
from vox_torch.base import load_base, without_weights
from vox_torch.experts import model_weights
from vox_torch.forward import Together
from vox_torch.load import Streamed
from vox_torch.trial import loss_of

TOKENS = torch.arange(40, 72)[None]

mixtures = pytest.mark.parametrize("family", MIXTURES)


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits[0].numpy()


@mixtures
def test_read_from_the_files_it_computes_what_transformers_does(tiny, family):
    folder = tiny(family)
    expected = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    found = logits(Streamed(folder).base)
    assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()


@mixtures
def test_every_parameter_is_read(tiny, family):
    folder = tiny(family)
    weights = model_weights(without_weights(folder, torch.float32), folder)
    for name, parameter in AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).named_parameters():
        assert np.array_equal(weights.read(name), parameter.detach().numpy()), name


@mixtures
def test_adapters_are_beside_the_feed_forward_blocks(tiny, family):
    names = linear_modules(WeightFolder(tiny(family)).tensors, MIXTURES[family][0])
    beside = {path.rpartition(".")[2] for path in names}
    assert beside - {"lm_head"} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_an_expert_that_is_missing_is_told(tiny, tmp_path):
    folder = shutil.copytree(tiny("qwen2_moe"), tmp_path / "model")
    path = folder / "model.safetensors"
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({n: each for n, each in load_file(path).items() if n != gone}, path)
    with pytest.raises(ModelError, match=re.escape("model.layers.1.mlp.experts.gate_up_proj")):
        Streamed(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_file_of_experts_that_became_stacks_is_let_go(tiny):
    folder = tiny("mixtral")
    kept = load_base(folder, "fp32", "cpu")
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert logits(kept).shape[0] == TOKENS.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leak", [0.0, 0.02])
def test_a_document_that_sees_another_is_noticed(tiny, dtype, leak):
    """Though rounding in the products of experts depends on how many tokens took them."""
    model = AutoModelForCausalLM.from_pretrained(tiny("mixtral"), dtype=dtype)
    model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda _module, _given, found: found + leak * found.mean(dim=1, keepdim=True)
    )
    loss, fault = loss_of(model, "cpu")
    assert isinstance(loss, Together) == (leak == 0.0), fault
    assert leak == 0.0 or "a document changes the next one" in str(fault)
    assert model.config._experts_implementation != "vox_rows"


@mixtures
@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_documents_end_to_end(tiny, family, quant):
    """But for attention sinks, which `vox_torch.attention` has not got."""
    model = load_base(tiny(family), "fp32", "cpu", quant)
    loss, fault = loss_of(model, "cpu")
    assert isinstance(loss, Together) == (family != "gpt_oss"), fault


def test_of_quantised_experts_no_weight_is_kept_for_the_backward_pass(tiny):
    model = load_base(tiny("mixtral"), "fp32", "cpu", "nf4")
    experts = model.model.layers[0].mlp.experts
    x_XH = torch.ones(6, model.config.hidden_size, requires_grad=True)
    chosen_XK = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y_XH = experts(x_XH, chosen_XK, torch.full((6, 2), 0.5))
    config = model.config
    assert 0 < max(each.numel() for each in kept) < config.hidden_size * config.intermediate_size
    (gradient,) = torch.autograd.grad(y_XH.sum(), x_XH)
    assert gradient.abs().min() > 0


def test_experts_in_a_loop_of_the_familys_own_are_not_quantised(tmp_path):
    config = AutoConfig.for_model("llama4_text", **MIXTURES["mixtral"][1])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be quantised"):
        load_base(tmp_path, "fp32", "cpu", "nf4")
