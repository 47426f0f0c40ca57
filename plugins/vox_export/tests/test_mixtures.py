"""Mixtures of experts as GGUF: experts in one stack a layer, and what is refused.

Byte for byte against llama.cpp's converters: benchmarks/gguf_against_llamacpp.py; its logits:
benchmarks/gguf_in_llamacpp.py.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from vox_core.config import validate
from vox_core.contract import AdapterState, LowRank
from vox_core.errors import AdapterError, ModelError, ProofError
from vox_core.run.reference import resolve_reference
from vox_core.run.train import train
from vox_core.weights import WeightFolder, write_safetensors
from vox_export import llama_cpp, quality
from vox_export.export import export, read_lora, write_gguf
from vox_export.gguf_file import ModelFile, Stored, require_lora, write_lora
from vox_export.settings import ExportSettings
from vox_formats.gguf_families import LAYOUTS
from vox_testing import tiny as tiny_models

Kind = gguf.GGMLQuantizationType

COMMON = tiny_models.FAMILIES["llama"][1]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "olmoe": {**EXPERTS, "num_key_value_heads": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 4,
    },
}
MIXTURES = (*tiny_models.MIXTURES, *MORE)


@pytest.fixture(autouse=True)
def _without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "engine", lambda: None)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`mixture(family)` -> model folder, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            with pytest.MonkeyPatch.context() as patched:
                for name, settings in MORE.items():
                    known = name, {**COMMON, **settings}
                    patched.setitem(tiny_models.MIXTURES, name, known)
                folder = tmp_path_factory.mktemp(family) / "base"
                made[family] = tiny_models.make_model(family, folder)
        return made[family]

    return make


def written(folder: Path, path: Path, quant: str = "f32") -> dict[str, Any]:
    """Write a model; return name -> tensor as stored."""
    write_gguf(resolve_reference(str(folder)), quant, path)
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}


# --- tensors --------------------------------------------------------------------------------------


def stacks(family: str, module: Any) -> tuple[Any, Any, Any]:
    """Gate, up and down of transformers' experts, each (E, O, I)."""
    both, down = module.gate_up_proj.numpy(), module.down_proj.numpy()
    if family == "gpt_oss":
        both, down = both.swapaxes(1, 2), down.swapaxes(1, 2)
        return both[:, ::2], both[:, 1::2], down
    half = both.shape[1] // 2
    return both[:, :half], both[:, half:], down


@pytest.mark.parametrize("family", MIXTURES)
def test_the_stacks_are_the_experts_of_transformers(mixture, tmp_path, family) -> None:
    from transformers import AutoModelForCausalLM

    folder = mixture(family)
    found = written(folder, tmp_path / "m.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    layer = model.model.layers[1]  # the first one may be dense
    block = getattr(layer, "block_sparse_moe", None) or layer.mlp
    for name, expected in zip(("gate", "up", "down"), stacks(family, block.experts), strict=True):
        assert np.array_equal(found[f"blk.1.ffn_{name}_exps.weight"], expected), name
    source = resolve_reference(str(folder))
    back = quality.dequantised(tmp_path / "m.gguf", ModelFile(source, "f32"))
    assert back.tensors.keys() == source.weights.tensors.keys()
    for name in back.tensors:
        assert np.array_equal(back.read(name), source.weights.read(name)), name


def test_stacks_on_the_disk_make_the_same_file(mixture, tmp_path) -> None:
    one_by_one, stacked = mixture("qwen2_moe"), tmp_path / "m"
    shutil.copytree(one_by_one, stacked)
    weights = WeightFolder(one_by_one)
    tensors = {n: weights.read(n) for n in weights.tensors if ".experts." not in n}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([weights.read(f"{path}.{n}.{part}_proj.weight") for n in range(12)])
            for part in ("gate", "up", "down")
        )
        tensors |= {
            f"{path}.gate_up_proj": np.concatenate([gate, up], 1),
            f"{path}.down_proj": down,
        }
    specs = {name: ("F32", array.shape) for name, array in tensors.items()}
    write_safetensors(stacked / "model.safetensors", specs, tensors.items())
    found, expected = written(stacked, tmp_path / "a"), written(one_by_one, tmp_path / "b")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


def test_keys_and_values_of_deepseek_are_apart(mixture, tmp_path) -> None:
    folder = mixture("deepseek_v3")
    found = written(folder, tmp_path / "m.gguf")
    both = WeightFolder(folder).read("model.layers.0.self_attn.kv_b_proj.weight")
    heads = both.reshape(4, 8 + 4, 16)
    assert np.array_equal(found["blk.0.attn_k_b.weight"], heads[:, :8].swapaxes(1, 2))
    assert np.array_equal(found["blk.0.attn_v_b.weight"], heads[:, 8:])


def test_routers_stay_float32(mixture, tmp_path) -> None:
    write_gguf(resolve_reference(str(mixture("qwen2_moe"))), "q8_0", tmp_path / "m.gguf")
    kinds = {t.name: t.tensor_type for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert (
        kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.ffn_gate_inp_shexp.weight"] == Kind.F32
    )
    assert kinds["blk.0.ffn_gate_exps.weight"] == Kind.Q8_0


def test_one_expert_at_a_time_is_in_memory(tmp_path) -> None:
    experts = (np.ones((256, 1024), np.float32) for _ in range(16))  # 1 MB each
    tracemalloc.start()
    with (tmp_path / "stack").open("wb") as file:
        Stored(experts, Kind.F16, 0).tofile(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert (tmp_path / "stack").stat().st_size == 16 << 19


# --- metadata -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "qwen2_moe",
            {
                "expert_count": 12,
                "expert_used_count": 2,
                "expert_feed_forward_length": 16,
                "expert_shared_feed_forward_length": 24,
            },
        ),
        ("gpt_oss", {"expert_count": 4, "attention.sliding_window": 16}),
        (
            "glm4_moe",
            {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2},
        ),
        ("deepseek_v3", {"attention.head_count_kv": 1, "attention.key_length_mla": 16}),
    ],
)
def test_the_file_says_how_experts_are_chosen(mixture, tmp_path, family, expected) -> None:
    write_gguf(resolve_reference(str(mixture(family))), "f16", tmp_path / "m.gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    arch = fields["general.architecture"].contents()
    found = {key: fields[f"{arch}.{key}"].contents() for key in expected}
    assert found == expected
    assert fields["general.size_label"].contents().startswith(("4x", "12x"))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "said", "fault"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False, expected True"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob True, expected False"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("mixtral", {"num_local_experts": 3}, "found 4 experts, expected 3"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "weights in mxfp4"),
        ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank None"),
    ],
)
def test_a_mixture_that_llama_cpp_computes_otherwise_is_refused(
    mixture, tmp_path, family, said, fault
) -> None:
    shutil.copytree(mixture(family), tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps({**config, **said}))
    with pytest.raises(ModelError) as caught:
        write_gguf(resolve_reference(str(tmp_path / "m")), "f32", None)
    assert any(fault in each for each in caught.value.faults), caught.value.faults


def test_deepseeks_yarn_has_one_scale() -> None:
    config = {"num_hidden_layers": 2, "vocab_size": 9, "q_lora_rank": 4}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
    for scale, refused in ((1.0, False), (0.5, True)):
        given = {**config, "rope_parameters": {**rope, "mscale_all_dim": scale}}
        assert bool(list(LAYOUTS["deepseek_v3"].refusals(given))) is refused


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    names = [f"model.layers.{n}.input_layernorm.weight" for n in range(3)]
    config = {"num_hidden_layers": 2}
    assert len(LAYOUTS["glm4_moe"].tensors([*names, "model.layers.2.eh_proj.weight"], config)) == 2


def test_rotary_frequencies_of_gpt_oss_are_noted(mixture) -> None:
    model = ModelFile(resolve_reference(str(mixture("gpt_oss"))), "f16")
    (note,) = model.layout.notes(model.config)
    assert "YaRN" in note


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_on_a_mixture_is_exported(mixture, settings, tmp_path, monkeypatch) -> None:
    """As one that does not fit into memory."""
    run, events = train(settings(mixture("mixtral"), lr=2e-2)).run, []
    monkeypatch.setattr(quality, "float32_bytes", lambda source: 1 << 60)
    given = {"to": "gguf", "quant": "f32", "out": tmp_path / "out"}
    report = export(str(run), validate(ExportSettings, given), observe=events.append)
    assert any("computing from its files" in str(event) for event in events)
    assert report.quality.median_kl < 1e-9
    assert report.quality.carried == pytest.approx(1, abs=1e-3)
    source = resolve_reference(str(run))
    write_lora(tmp_path / "lora.gguf", source, "lora")
    back = read_lora(tmp_path / "lora.gguf", source)
    for path, module in source.adapter.modules.items():
        assert np.array_equal(back.modules[path].B_OR, module.B_OR), path


def test_an_adapter_whose_rows_llama_cpp_splits_is_exported_merged_only(mixture) -> None:
    source = resolve_reference(str(mixture("deepseek_v3")))
    path = "model.layers.0.self_attn.kv_b_proj"
    low_rank = LowRank(np.ones((2, 16), np.float32), np.ones((48, 2), np.float32), 2.0)
    adapter = AdapterState("lora", {path: low_rank})
    with pytest.raises(AdapterError) as caught:
        require_lora(replace(source, adapter=adapter))
    split = "blk.0.attn_k_b.weight and blk.0.attn_v_b.weight"
    assert caught.value.faults == (f"{path}: llama.cpp splits it into {split}",)


def test_a_token_that_goes_to_other_experts_does_not_refuse_a_file() -> None:
    """Of 4 positions, rounding changed one."""
    found = quality.Quality("e", "r", "s", "t", 4, 0.2, 1, 1, 1, 1, 1, 1, median_kl=1e-7)
    quality.require_kept(found, "f16", None)
    with pytest.raises(ProofError):
        quality.require_kept(replace(found, median_kl=None), "f16", None)
    with pytest.raises(ProofError, match="median"):
        quality.require_kept(replace(found, median_kl=0.1), "f16", None)
    with pytest.raises(ProofError):
        quality.require_kept(found, "f16", 0.1)
