"""The families that vox writes as GGUF: metadata, tensors, and settings that are built in.

What llama.cpp's graphs expect beyond names is written here, family by family: rows of Q and K in
pairs (llama), norms as 1 + w (gemma3), transposed weights (gpt2), rotary factors as tensors
(llama3, longrope), gate and up apart (granitemoe, gpt_oss), keys and values apart (deepseek_v3).

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

Shape legend: H heads, D half a head, E experts, O output features, I input features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter, RopeScalingType

from vox_formats.gguf_layout import (
    FIRST,
    LINEAR_ROPE,
    SAME,
    SECOND,
    SILU,
    STACKED,
    Array,
    Change,
    Config,
    Layout,
    Parts,
    experts,
    layers,
    rope_of,
)

# --- metadata -------------------------------------------------------------------------------------


def _common(writer: GGUFWriter, config: Config) -> None:
    """Write what every family with rotary embeddings has."""
    writer.add_block_count(layers(config))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if count := experts(config):
        writer.add_expert_count(count)
    _keys(
        writer,
        config,
        num_experts_per_tok="expert_used_count",
        n_group="expert_group_count",
        topk_group="expert_group_used_count",
    )
    rope = rope_of(config)
    if rope["rope_theta"] is not None:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        _scaling(writer, rope)


def _keys(writer: GGUFWriter, config: Config, **keys: str) -> None:
    """Write settings, each under the name that the writer's method `add_NAME` has."""
    for setting, name in keys.items():
        if config.get(setting) is not None:
            getattr(writer, f"add_{name}")(config[setting])


def _scaling(writer: GGUFWriter, rope: Mapping[str, Any]) -> None:
    writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
    writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] != "yarn":
        return
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for key, add in (
        ("extrapolation_factor", writer.add_rope_scaling_yarn_ext_factor),
        ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
        ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
    ):
        if rope.get(key) is not None:
            add(rope[key])


def _with_head_size(writer: GGUFWriter, config: Config) -> None:
    _common(writer, config)
    if (size := config.get("head_dim")) is not None:
        writer.add_key_length(size)
        writer.add_value_length(size)


def _head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _llama(writer: GGUFWriter, config: Config) -> None:
    _with_head_size(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(_head_size(config))


def _granite(writer: GGUFWriter, config: Config) -> None:
    _common(writer, config)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    _keys(
        writer,
        config,
        vocab_size="vocab_size",
        attention_multiplier="attention_scale",
        embedding_multiplier="embedding_scale",
        residual_multiplier="residual_scale",
        logits_scaling="logit_scale",
    )


def _qwen_moe(writer: GGUFWriter, config: Config) -> None:
    _with_head_size(writer, config)
    _keys(
        writer,
        config,
        moe_intermediate_size="expert_feed_forward_length",
        shared_expert_intermediate_size="expert_shared_feed_forward_length",
    )


def _gpt_oss(writer: GGUFWriter, config: Config) -> None:
    _with_head_size(writer, config)
    _keys(
        writer,
        config,
        intermediate_size="expert_feed_forward_length",
        sliding_window="sliding_window",
    )


def _glm4_moe(writer: GGUFWriter, config: Config) -> None:
    _with_head_size(writer, config)
    _routed(writer, config)
    writer.add_rope_dimension_count(int(_head_size(config) * _rotated_share(config, 0.5)))


def _deepseek_v3(writer: GGUFWriter, config: Config) -> None:
    """Keys and values of all heads are one compressed row, as llama.cpp computes them."""
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    _common(writer, {**config, "num_key_value_heads": 1})
    _routed(writer, config)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    if (scale := rope_of(config).get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)
    _keys(
        writer,
        config,
        vocab_size="vocab_size",
        q_lora_rank="q_lora_rank",
        kv_lora_rank="kv_lora_rank",
        v_head_dim="value_length_mla",
        qk_rope_head_dim="rope_dimension_count",
    )


def _routed(writer: GGUFWriter, config: Config) -> None:
    """Write what mixtures have that route as DeepSeek V3 does."""
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    _keys(
        writer,
        config,
        moe_intermediate_size="expert_feed_forward_length",
        n_shared_experts="expert_shared_count",
        first_k_dense_replace="leading_dense_block_count",
        routed_scaling_factor="expert_weights_scale",
        norm_topk_prob="expert_weights_norm",
    )


def _gemma3(writer: GGUFWriter, config: Config) -> None:
    _with_head_size(writer, config)
    rope = config.get("rope_parameters") or {}
    local = (rope.get("sliding_attention") or {}).get(
        "rope_theta", config.get("rope_local_base_freq")
    )
    if local is not None:
        writer.add_rope_freq_base_swa(local)
    if cap := config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)
    writer.add_sliding_window(config["sliding_window"])


def _gpt2(writer: GGUFWriter, config: Config) -> None:
    writer.add_block_count(layers(config))
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _phi3(writer: GGUFWriter, config: Config) -> None:
    _common(writer, config)
    writer.add_rope_scaling_orig_ctx_len(_original_positions(config))
    writer.add_rope_dimension_count(_phi3_rotated(config))
    writer.add_sliding_window(config.get("sliding_window") or 0)
    if rope_of(config).get("long_factor"):
        writer.add_rope_scaling_attn_factors(_longrope_attention(config))


def _original_positions(config: Config) -> int:
    own = config.get("original_max_position_embeddings", config["max_position_embeddings"])
    return int(rope_of(config).get("original_max_position_embeddings") or own)


def _phi3_rotated(config: Config) -> int:
    share = _rotated_share(config, 1.0)
    return int(share * config["hidden_size"]) // int(config["num_attention_heads"])


def _rotated_share(config: Config, default: float) -> float:
    key = "partial_rotary_factor"
    return float(rope_of(config).get(key, config.get(key, default)))


def _longrope_attention(config: Config) -> float:
    before = _original_positions(config)
    longer: float = config["max_position_embeddings"] / before
    return math.sqrt(1 + math.log(longer) / math.log(before)) if longer > 1 else 1.0


# --- tensors --------------------------------------------------------------------------------------

TRANSPOSED = Change(apply=lambda w: w.T, undo=lambda w: w.T)
ONE_MORE = Change(apply=lambda w: w + np.float32(1), undo=lambda w: w - np.float32(1))


def in_pairs(heads: int) -> Change:
    """Rows of each head from (a0 a1 … b0 b1 …) to (a0 b0 a1 b1 …)."""

    def apply(rows: Array) -> Array:
        rows_H2D = rows.reshape(heads, 2, -1, *rows.shape[1:])
        return rows_H2D.swapaxes(1, 2).reshape(rows.shape)

    def undo(rows: Array) -> Array:
        rows_HD2 = rows.reshape(heads, -1, 2, *rows.shape[1:])
        return rows_HD2.swapaxes(1, 2).reshape(rows.shape)

    return Change(apply=apply, undo=undo, rows=apply)


def _llama_change(name: str, config: Config) -> Change:
    if ".q_proj." in name:
        return in_pairs(config["num_attention_heads"])
    return in_pairs(config["num_key_value_heads"]) if ".k_proj." in name else SAME


def _gemma3_change(name: str, config: Config) -> Change:
    return ONE_MORE if name.endswith("norm.weight") else SAME


def _gpt2_change(name: str, config: Config) -> Change:
    is_linear = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    return TRANSPOSED if is_linear else SAME


def _llama3_factors(config: Config) -> Mapping[str, Array]:
    """Return Llama 3's factors, by which llama.cpp divides each rotary frequency."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return {}
    size = _head_size(config)
    # The powers and everything after them in float32, as llama.cpp's own converter has them.
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    wavelengths = 2 * np.pi * np.power(np.float32(rope["rope_theta"]), exponents)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    before = rope["original_max_position_embeddings"]
    kept = np.clip((before / wavelengths - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - kept) / factor + kept)).astype(np.float32)}


def _phi3_factors(config: Config) -> Mapping[str, Array]:
    rope = rope_of(config)
    return {
        f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], np.float32)
        for kind in ("long", "short")
        if rope.get("long_factor")
    }


# Names of the files, which `gguf` knows, for those of transformers 5.
_MIXTRAL: Parts = {
    r"\.mlp\.(experts\.\d+\.w\d)\.weight$": {r".block_sparse_moe.\1.weight": SAME},
}
_GRANITE: Parts = {
    r"\.router\.weight$": {".router.layer.weight": SAME},
    r"block_sparse_moe\.input_linear\.weight$": {
        "mlp.experts.gate_proj.weight": FIRST,
        "mlp.experts.up_proj.weight": SECOND,
    },
}
# Stacks of shape (E, I, O), with gate and up in turns.
_GPT_OSS: Parts = {
    r"\.gate_up_proj$": {
        ".gate_proj.weight": Change(part=lambda w: w.swapaxes(1, 2)[:, ::2]),
        ".up_proj.weight": Change(part=lambda w: w.swapaxes(1, 2)[:, 1::2]),
    },
    r"\.gate_up_proj_bias$": {
        ".gate_proj.bias": Change(part=lambda b: b[:, ::2]),
        ".up_proj.bias": Change(part=lambda b: b[:, 1::2]),
    },
    r"\.down_proj$": {".down_proj.weight": Change(part=lambda w: w.swapaxes(1, 2))},
    r"\.down_proj_bias$": {".down_proj.bias": SAME},
    r"\.sinks$": {".sinks.weight": SAME},
}


def _deepseek_parts(config: Config) -> Parts:
    """Keys and values of each head apart, and the keys transposed."""
    size = config["qk_nope_head_dim"]

    def heads(w: Array) -> Array:
        return w.reshape(config["num_attention_heads"], -1, w.shape[-1])

    keys = Change(part=lambda w: heads(w)[:, :size].swapaxes(1, 2))
    values = Change(part=lambda w: heads(w)[:, size:])
    split = {".k_b_proj.weight": keys, ".v_b_proj.weight": values}
    return {**STACKED, r"\.kv_b_proj\.weight$": split}


# --- what the graphs have built in ----------------------------------------------------------------

_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _gemma3_built_in(config: Config) -> Mapping[str, Any]:
    count = layers(config)
    # llama.cpp knows the 27B model by its layers, and takes 1/sqrt(head size) for all others.
    size = config["hidden_size"] / config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [
            "full_attention" if n % 6 == 5 else "sliding_attention" for n in range(count)
        ],
        "query_pre_attn_scalar": size if count == 62 else config["head_dim"],
        "attn_logit_softcapping": None,
    }


def _gpt2_built_in(config: Config) -> Mapping[str, Any]:
    return {
        "activation_function": "gelu_new",
        "n_inner": config.get("n_inner") and 4 * config["n_embd"],
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
    }


def _smollm3_built_in(config: Config) -> Mapping[str, Any]:
    return {**SILU, "no_rope_layers": [int(n % 4 != 3) for n in range(layers(config))]}


def _qwen2_moe_built_in(config: Config) -> Mapping[str, Any]:
    return {**SILU, **_EVERY_LAYER, "norm_topk_prob": False, "tie_word_embeddings": False}


def _qwen3_moe_built_in(config: Config) -> Mapping[str, Any]:
    return {**SILU, **_EVERY_LAYER, "norm_topk_prob": True, "attention_bias": False}


def _olmoe_built_in(config: Config) -> Mapping[str, Any]:
    return {
        **SILU,
        "norm_topk_prob": False,
        "num_key_value_heads": config["num_attention_heads"],
        "clip_qkv": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _gpt_oss_built_in(config: Config) -> Mapping[str, Any]:
    kinds = "sliding_attention", "full_attention"
    return {
        **SILU,
        "layer_types": [kinds[n % 2] for n in range(layers(config))],
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
    }


def _deepseek_v3_built_in(config: Config) -> Mapping[str, Any]:
    rope, size = dict(rope_of(config)), (layers(config), config["vocab_size"])
    if rope["rope_type"] == "yarn":  # one scale of attention, for all dimensions
        scale = rope.get("mscale_all_dim", 1.0)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    # llama.cpp knows the models without a compressed query by their size.
    whole = size[0] in (26, 27) or size == (48, 128256)
    return {
        **SILU,
        "rope_parameters": rope,
        "q_lora_rank": None if whole else config.get("q_lora_rank") or "a number",
        "rope_interleave": True,
        "attention_bias": False,
    }


_LLAMA = Layout(
    MODEL_ARCH.LLAMA,
    _llama,
    change=_llama_change,
    rope=LINEAR_ROPE | {"llama3"},
    factors=_llama3_factors,
)

LAYOUTS: Mapping[str, Layout] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": replace(_LLAMA, parts=lambda config: {**STACKED, **_MIXTRAL}),
    "qwen2": Layout(MODEL_ARCH.QWEN2, _with_head_size),
    "qwen3": Layout(MODEL_ARCH.QWEN3, _with_head_size),
    "qwen2_moe": Layout(MODEL_ARCH.QWEN2MOE, _qwen_moe, _qwen2_moe_built_in),
    "qwen3_moe": Layout(MODEL_ARCH.QWEN3MOE, _qwen_moe, _qwen3_moe_built_in),
    "olmoe": Layout(MODEL_ARCH.OLMOE, _with_head_size, _olmoe_built_in),
    "gemma3_text": Layout(
        MODEL_ARCH.GEMMA3,
        _gemma3,
        _gemma3_built_in,
        _gemma3_change,
        frozenset({"default", "linear"}),
        windowed=True,
    ),
    "gpt2": Layout(MODEL_ARCH.GPT2, _gpt2, _gpt2_built_in, _gpt2_change),
    "phi3": Layout(
        MODEL_ARCH.PHI3, _phi3, rope=frozenset({"default", "longrope"}), factors=_phi3_factors
    ),
    "granite": Layout(MODEL_ARCH.GRANITE, _granite, change=_llama_change),
    "granitemoe": Layout(
        MODEL_ARCH.GRANITE_MOE, _granite, change=_llama_change, parts=lambda config: _GRANITE
    ),
    "smollm3": replace(_LLAMA, arch=MODEL_ARCH.SMOLLM3, built_in=_smollm3_built_in),
    "gpt_oss": Layout(
        MODEL_ARCH.GPT_OSS,
        _gpt_oss,
        _gpt_oss_built_in,
        parts=lambda config: _GPT_OSS,
        windowed=True,
    ),
    "glm4_moe": Layout(MODEL_ARCH.GLM4_MOE, _glm4_moe),
    "deepseek_v3": Layout(
        MODEL_ARCH.DEEPSEEK2, _deepseek_v3, _deepseek_v3_built_in, parts=_deepseek_parts
    ),
}
"""`model_type` -> layout."""
