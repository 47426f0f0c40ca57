"""The canonical adapter: targets from headers, a seeded start, PEFT's files, the fit to a base."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from vox_core.adapter.initial import initial_adapter
from vox_core.adapter.peft import read_adapter, write_adapter
from vox_core.adapter.targets import linear_modules, parameter_names, require_fit, select_targets
from vox_core.contract import AdapterSpec, AdapterState, LowRank, ModuleShape
from vox_core.errors import AdapterError, PlanError


@dataclass
class Header:
    shape: tuple[int, ...]


LLAMA = {
    "model.embed_tokens.weight": Header((64, 8)),
    "model.layers.0.self_attn.q_proj.weight": Header((8, 8)),
    "model.layers.0.self_attn.q_proj.bias": Header((8,)),
    "model.layers.0.mlp.down_proj.weight": Header((8, 16)),
    "model.layers.0.input_layernorm.weight": Header((8,)),
    "lm_head.weight": Header((64, 8)),
}
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def spec(method: str = "lora", rank: int = 4) -> AdapterSpec:
    return AdapterSpec(method, rank, 8.0, 0.0, ("all-linear",))


def read(_tensor: str) -> np.ndarray:
    return np.ones((8, 8), np.float32)


def adapter(method: str = "lora") -> AdapterState:
    modules = select_targets(linear_modules(LLAMA, "llama"), ["q_proj"])
    state = initial_adapter(modules, spec(method), 1, read)
    return state.with_tensors({n: v + 1 for n, v in state.tensors().items()})


def test_all_linear_is_every_matrix_but_embedding_and_head():
    modules = linear_modules(LLAMA, "llama")
    assert list(modules) == [Q, DOWN, "lm_head"]
    assert list(select_targets(modules, ["all-linear"])) == [Q, DOWN]
    assert list(select_targets(modules, ["lm_head", "mlp.down_proj"])) == [DOWN, "lm_head"]
    assert modules[DOWN] == ModuleShape("model.layers.0.mlp.down_proj.weight", 8, 16)


def test_gpt2_is_stored_transposed_and_without_its_prefix():
    old = {"h.0.attn.c_attn.weight": Header((8, 24)), "wte.weight": Header((64, 8))}
    (path,) = linear_modules(old, "gpt2")
    assert path == "transformer.h.0.attn.c_attn"
    shape = linear_modules(old, "gpt2")[path]
    assert shape == ModuleShape("h.0.attn.c_attn.weight", 24, 8, transposed=True)


def test_the_language_model_is_found_inside_a_multimodal_qwen3_5():
    nested = {
        "model.language_model.layers.0.mlp.up_proj.weight": Header((16, 8)),
        "model.visual.blocks.0.mlp.fc1.weight": Header((16, 8)),
        "mtp.layers.0.mlp.up_proj.weight": Header((16, 8)),
    }
    assert list(linear_modules(nested, "qwen3_5")) == ["model.layers.0.mlp.up_proj"]
    assert list(parameter_names(nested, "qwen3_5")) == ["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("model_type", "beside", "path"),
    [
        ("gemma4", "model.audio_tower.layers.0", "model.language_model.layers.0.mlp.up_proj"),
        ("gemma4_unified", "model.vision_embedder", "model.language_model.layers.0.mlp.up_proj"),
        ("llama4", "vision_model.layers.0", "language_model.model.layers.0.mlp.up_proj"),
    ],
)
def test_what_lies_beside_the_language_model_gets_no_adapter(model_type, beside, path):
    files = {f"{name}.weight": Header((8, 8)) for name in (f"{beside}.fc1", path)}
    found = select_targets(linear_modules(files, model_type), ["all-linear"])
    assert list(found) == [path.removeprefix("language_model.")]


def test_unknown_targets_are_all_named_with_the_nearest():
    with pytest.raises(PlanError) as caught:
        select_targets(linear_modules(LLAMA, "llama"), ["q_prj", "nothing", "down_proj"])
    assert caught.value.code == "VOX-P002"
    assert caught.value.found == "q_prj, nothing"
    assert caught.value.faults == ("q_prj: did you mean q_proj?",)
    with pytest.raises(PlanError) as caught:
        select_targets(linear_modules(LLAMA, "llama"), ["q_proj,v_proj"])
    several = "q_proj,v_proj: several names; repeat the option, or give a list"
    assert caught.value.faults == (several,)


def test_the_start_depends_on_seed_and_path_alone():
    modules = linear_modules(LLAMA, "llama")
    every = initial_adapter(modules, spec(), 1, read)
    one = initial_adapter({Q: modules[Q]}, spec(), 1, read)
    other = initial_adapter({Q: modules[Q]}, spec(), 2, read)
    assert np.array_equal(every.modules[Q].A_RI, one.modules[Q].A_RI)
    assert not np.array_equal(one.modules[Q].A_RI, other.modules[Q].A_RI)
    assert not any(module.B_OR.any() for module in every.modules.values())
    # Kaiming-uniform with a = sqrt(5) is U(-1/sqrt(I), 1/sqrt(I)), as PEFT draws it.
    assert np.abs(every.modules[DOWN].A_RI).max() <= 1 / np.sqrt(16)


def test_the_seeded_start_never_changes():
    # Recorded from numpy 2.4 on x86-64; a run resumed with another numpy must start alike.
    A_RI = initial_adapter({Q: ModuleShape("t", 1, 4)}, spec(rank=1), 42, read).modules[Q].A_RI
    assert A_RI.tolist() == [RECORDED]


RECORDED = [-0.17630788683891296, -0.21579502522945404, 0.42360830307006836, -0.36115285754203796]


@pytest.mark.parametrize(
    ("method", "scale"), [("lora", 8 / 4), ("dora", 8 / 4), ("rslora", 8 / np.sqrt(4))]
)
def test_scale(method, scale):
    assert adapter(method).scale(Q) == pytest.approx(scale)


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
def test_files_round_trip(tmp_path, method):
    state = adapter(method)
    write_adapter(tmp_path, state, base="b", modules=linear_modules(LLAMA, "llama"))
    again = read_adapter(tmp_path)
    assert again.method == method
    assert again.scale(Q) == state.scale(Q)
    assert again.tensors().keys() == state.tensors().keys()
    for name, value in state.tensors().items():
        assert np.array_equal(again.tensors()[name], value)


def test_peft_builds_the_same_modules_from_the_files(tmp_path):
    from peft import LoraConfig

    ranks = {Q: 2, DOWN: 4}
    modules = {
        path: LowRank(np.ones((r, 8), np.float32), np.ones((8, r), np.float32), 2.0 * r)
        for path, r in ranks.items()
    }
    state = AdapterState("lora", modules)
    write_adapter(tmp_path, state, base="b", modules=linear_modules(LLAMA, "llama"))
    config = LoraConfig.from_pretrained(tmp_path)
    assert sorted(config.target_modules) == ["down_proj", "q_proj"]
    again = read_adapter(tmp_path)
    assert {p: m.rank for p, m in again.modules.items()} == ranks
    assert {p: m.alpha for p, m in again.modules.items()} == {Q: 4.0, DOWN: 8.0}


def test_targets_are_written_whole_where_their_last_part_would_reach_more(tmp_path):
    two = {**LLAMA, "model.layers.1.self_attn.q_proj.weight": Header((8, 8))}
    write_adapter(tmp_path, adapter(), base="b", modules=linear_modules(two, "llama"))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == [Q]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("bias", "all"),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]),
        ("use_dora", True),
        ("init_lora_weights", "pissa"),
    ],
)
def test_what_vox_cannot_represent_is_refused_by_name(tmp_path, key, value):
    write_adapter(tmp_path, adapter("rslora"), base="b", modules=linear_modules(LLAMA, "llama"))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(AdapterError, match="cannot represent") as caught:
        read_adapter(tmp_path)
    assert key in "".join(caught.value.faults)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(AdapterError) as caught:
        read_adapter(tmp_path)
    assert caught.value.code == "VOX-A001"


def test_every_mismatch_with_the_base_is_listed():
    modules = linear_modules(LLAMA, "llama")
    foreign = AdapterState(
        "lora",
        {
            Q: LowRank(np.ones((4, 9), np.float32), np.ones((8, 4), np.float32), 8.0),
            "model.layers.7.x": adapter().modules[Q],
        },
    )
    with pytest.raises(AdapterError) as caught:
        require_fit(foreign, modules, {}, "here")
    assert len(caught.value.faults) == 2
    require_fit(adapter(), modules, {}, "here")


def test_whole_tensors_are_held_against_the_base_too():
    saved = {"lm_head.weight": np.ones((64, 9), np.float32), "x.weight": np.ones(1, np.float32)}
    state = AdapterState("lora", adapter().modules, saved)
    with pytest.raises(AdapterError) as caught:
        require_fit(state, linear_modules(LLAMA, "llama"), {"lm_head.weight": (64, 8)}, "here")
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize(
    ("key", "value"), [("lora_alpha", "x"), ("alpha_pattern", {"(": 8}), ("modules_to_save", 5)]
)
def test_a_config_with_values_of_the_wrong_type_is_refused(tmp_path, key, value):
    write_adapter(tmp_path, adapter(), base="b", modules=linear_modules(LLAMA, "llama"))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(AdapterError) as caught:
        read_adapter(tmp_path)
    assert caught.value.code == "VOX-A001"
