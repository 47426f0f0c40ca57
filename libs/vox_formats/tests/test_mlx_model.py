"""`config.json` and module paths in mlx-lm's words, and what is refused.

tests/parity/test_mlx_config.py holds the settings against transformers' logits, and
tests/parity/test_interchange.py the paths against mlx-lm's modules.
"""

from __future__ import annotations

import pytest

from vox_formats import FormatError
from vox_formats.mlx_model import (
    FAMILIES,
    counterpart_fault,
    hf_path,
    misread,
    mlx_config,
    mlx_path,
    window,
)


def test_rope_parameters_are_what_mlx_lm_calls_rope_theta_and_rope_scaling():
    plain = mlx_config(
        {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    )
    assert plain["rope_theta"] == 10000.0
    assert plain.get("rope_scaling") is None
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    llama = mlx_config({"model_type": "llama", "rope_parameters": scaled})
    assert llama["rope_theta"] == 5e5
    assert llama["rope_scaling"] == {"rope_type": "llama3", "type": "llama3", "factor": 8.0}


def test_the_old_words_pass():
    config = {"model_type": "llama", "rope_theta": 1e6, "rope_scaling": None}
    assert mlx_config(config) == config


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["longrope", "dynamic", "su"])
def test_a_rope_that_would_be_another_is_refused(key, kind):
    with pytest.raises(FormatError) as caught:
        mlx_config({"model_type": "phi3", key: {"rope_type": kind, "rope_theta": 1e4}})
    assert kind in caught.value.found


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.parametrize("family", ["cohere", "gemma2", "phi"])
def test_scaling_is_refused_in_families_where_mlx_lm_has_none(key, kind, family):
    config = {key: {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}}
    assert mlx_config({"model_type": "llama", **config})
    with pytest.raises(FormatError) as caught:
        mlx_config({"model_type": family, **config})
    assert f"{kind} in {family}" in caught.value.found


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("more", "value"), [("attention_factor", 1.5), ("truncate", False)])
def test_details_of_a_scaling_that_are_not_read_are_refused(key, more, value):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert mlx_config({"model_type": "llama", key: {**yarn, more: None}})
    with pytest.raises(FormatError) as caught:
        mlx_config({"model_type": "llama", key: {**yarn, more: value}})
    assert f"yarn in llama with {more}" in caught.value.found


def test_a_scaling_of_gemma3s_sliding_layers_is_refused():
    rope = {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(FormatError) as caught:
        mlx_config({"model_type": "gemma3_text", "rope_parameters": rope})
    assert "linear in the sliding layers" in caught.value.found


def test_gemma3s_two_ropes_and_the_step_of_its_full_layers():
    config = mlx_config(
        {
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["sliding_window_pattern"] == 3


@pytest.mark.parametrize(
    "kinds",
    [["sliding_attention"] * 2, ["full_attention", "sliding_attention", "full_attention"]],
    ids=["none", "irregular"],
)
def test_layers_that_mlx_lm_cannot_place_are_refused(kinds):
    with pytest.raises(FormatError):
        mlx_config({"model_type": "gemma3_text", "layer_types": kinds})


def test_multimodal_configurations_are_translated_inside():
    rope = {"rope_type": "default", "rope_theta": 3.0}
    config = mlx_config({"model_type": "gemma3", "text_config": {"rope_parameters": rope}})
    assert config["text_config"]["rope_theta"] == 3.0


def test_a_wrapper_has_the_vocabulary_of_its_language_model():
    text = {"model_type": "gemma3_text", "vocab_size": 260}
    assert mlx_config({"model_type": "gemma3", "text_config": text})["vocab_size"] == 260


def test_gpt2s_positions_and_qwen3_5s_wrapper_have_other_names():
    assert mlx_config({"model_type": "gpt2", "n_positions": 512})["n_ctx"] == 512
    assert mlx_config({"model_type": "qwen3_5_text"})["model_type"] == "qwen3_5"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "rope_theta": 1e4}, []),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}}, ["rope_theta"]),
        (
            {"model_type": "llama", "rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
            [],
        ),
        ({"model_type": "gpt2", "n_positions": 512}, ["n_ctx"]),
        ({"model_type": "mistral", "sliding_window": 16}, ["sliding_window"]),
        ({"model_type": "mistral", "sliding_window": None}, []),
    ],
)
def test_what_mlx_lm_alone_would_misread_is_told_by_name(config, expected):
    assert [told.partition(" = ")[0] for told in misread(config)] == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "phi3", "sliding_window": 2047}, 2047),
        ({"model_type": "phi3", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, 64),
        ({"model_type": "mistral", "sliding_window": 64}, None),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, None),
    ],
)
def test_windows_that_mlx_lm_leaves_out(config, expected):
    assert window(config) == expected


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_beginnings_lead_back(model_type: str) -> None:
    for hf, _ in FAMILIES[model_type].beginnings:
        path = f"{hf}x" if hf.endswith(".") else hf
        assert hf_path(mlx_path(path, model_type), model_type) == path


def test_what_mlx_lm_lacks_is_named() -> None:
    assert counterpart_fault("model.vision_tower.x.fc1", "gemma3")
    assert counterpart_fault("model.visual.blocks.0.attn.qkv", "qwen3_5")
    assert counterpart_fault("model.layers.0.input_layernorm.weight", "qwen3_5")
    assert counterpart_fault("model.layers.0.linear_attn.norm.weight", "qwen3_5") is None
    assert counterpart_fault("model.layers.0.mlp.experts.3.up_proj", "mixtral")
    assert counterpart_fault("language_model.model.layers.0.mlp.up_proj", "qwen3_5")
    assert counterpart_fault("model.layers.0.mlp.up_proj", "llama") is None
