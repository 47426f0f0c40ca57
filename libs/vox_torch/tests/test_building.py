"""A model that is built without torch's symbols is the one that transformers builds."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MptConfig, PhimoeConfig

from vox_core.errors import ModelError
from vox_core.testing.tiny import FAMILIES
from vox_torch import base
from vox_torch.base import load_base
from vox_torch.building import WithoutSymbols

HALF = [1.0, 2.0]
ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": HALF, "long_factor": HALF, "factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
OTHERS = {
    "gpt_neox": GPTNeoXConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2),
    "mpt": MptConfig(d_model=16, n_heads=2, expansion_ratio=2),
    "phimoe": PhimoeConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2),
}


def require_same(folder, monkeypatch, dtype="fp32", tries=1):
    """Values, and no more tries than that."""
    contexts = []
    own = base._from_pretrained

    def noting(folder, dtype, context):
        contexts.append(type(context))
        return own(folder, dtype, context)

    monkeypatch.setattr(base, "_from_pretrained", noting)
    model = load_base(folder, dtype, "cpu")
    expected, _ = own(folder, dtype, nullcontext())
    assert contexts == [WithoutSymbols, nullcontext][:tries]
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    other = dict(expected.named_parameters()) | dict(expected.named_buffers())
    assert found.keys() == other.keys()
    for name, tensor in found.items():
        assert tensor.device.type == "cpu", name
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_same(tiny, monkeypatch, family, dtype):
    require_same(tiny(family), monkeypatch, dtype)


@pytest.mark.parametrize("rope", ROPES)
def test_every_form_of_rotary_positions_is_the_same(tiny, monkeypatch, tmp_path, rope):
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_theta", 10000.0)
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    given = {
        key: (HALF * half)[:half] if value is HALF else value for key, value in ROPES[rope].items()
    }
    config["rope_parameters"] = {"rope_type": rope, "rope_theta": theta, **given}
    (folder / "config.json").write_text(json.dumps(config))
    # Factors of longrope are tensors on the meta device.
    require_same(folder, monkeypatch, tries=2 if rope == "longrope" else 1)


@pytest.mark.parametrize("kind", OTHERS)
def test_families_that_nobody_thought_of_are_the_same(monkeypatch, tmp_path, kind):
    config = OTHERS[kind]
    for name, value in {"num_hidden_layers": 2, "vocab_size": 64, "n_layers": 2}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    require_same(tmp_path, monkeypatch)


def test_what_has_memory_is_filled():
    with WithoutSymbols():
        filled = torch.full((64,), 7.0).normal_()
        torch.nn.init.normal_(other := torch.full((64,), 7.0))
    assert (filled != 7).all()
    assert (other != 7).all()


def test_what_fails_otherwise_is_tried_once(tiny, monkeypatch):
    tries = []

    def fail(*_):
        tries.append(1)
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(base, "_from_pretrained", fail)
    with pytest.raises(ModelError, match="cannot load"):
        load_base(tiny("llama"), "fp32", "cpu")
    assert len(tries) == 1


def test_what_cannot_be_built_so_is_built_as_transformers_does(tiny, monkeypatch):
    """A range on the CPU beside a tensor on the meta device."""
    from transformers.models.llama import modeling_llama

    def both(self, *arguments):
        own(self, *arguments)
        torch.arange(4) * torch.ones(4)

    own = modeling_llama.LlamaMLP.__init__
    monkeypatch.setattr(modeling_llama.LlamaMLP, "__init__", both)
    folder = tiny("llama")
    with pytest.raises(RuntimeError, match="device"):
        base._from_pretrained(folder, "fp32", WithoutSymbols())
    assert load_base(folder, "fp32", "cpu").device.type == "cpu"
