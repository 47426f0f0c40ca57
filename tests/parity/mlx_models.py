"""Tiny models of every family that the MLX backend lists, and of what it refuses.

Settings that a family has and the others have not are set to what its models really use, so that a
setting which mlx-lm leaves out shows in the logits.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from vox_core.contract import LoadJob
from vox_mlx import backend

ROOT = Path(__file__).resolve().parents[2]
TOKENS_T = np.random.default_rng(0).integers(0, 256, 60)

_COMMON: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 259,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "initializer_range": 0.2,
}
_GPT2 = {
    "vocab_size": 260,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 259,
    "eos_token_id": 258,
    "initializer_range": 0.2,
}
_THREE_TO_ONE = {
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
_MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
_LINEAR_ATTENTION = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # Gradients and logits of this family grow with its weights: see held.SPREAD.
    "initializer_range": 0.05,
}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Two groups of four experts; each token has two of one group.
_ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 32,
}
OWN: dict[str, dict[str, Any]] = {
    "cohere2": _THREE_TO_ONE,
    "deepseek_v3": {
        **_ROUTED,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
    },
    "dots1": {**_ROUTED, "sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 64},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {**_ROUTED, "use_qk_norm": True},
    "gpt_oss": {
        **_LOCAL,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": _MULTIPLIERS,
    "granitemoe": {**_LOCAL, **_MULTIPLIERS},
    "lfm2_moe": {
        **_EXPERTS,
        "layer_types": ["conv", "full_attention", "full_attention"],
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
    },
    "mistral": {"sliding_window": 16},
    "mixtral": _LOCAL,
    "olmo3": _THREE_TO_ONE,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": _LINEAR_ATTENTION,
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "qwen3_next": {**_EXPERTS, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 48},
}
"""Family -> settings beside those that all have."""


def listed() -> list[str]:
    """The families of the manifest."""
    manifest = ROOT / "plugins/vox_mlx/vox_mlx/vox_plugin.toml"
    families: list[str] = tomllib.loads(manifest.read_text())["capabilities"]["families"]
    return families


def make(family: str, folder: Path, **changed: Any) -> Path:
    """A model of `family`, with its own settings and then those given."""
    common = _GPT2 if family == "gpt2" else _COMMON
    config = CONFIG_MAPPING[family](**{**common, **OWN.get(family, {}), **changed})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that do something
            parameter.add_(0.02 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):  # between experts
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return folder


def transformers_logits(folder: Path) -> np.ndarray:
    """float32 (T, V), of the folder as transformers reads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits_TV: np.ndarray = model(torch.tensor(TOKENS_T)[None]).logits[0].numpy()
    return logits_TV


def mlx_logits(folder: Path) -> np.ndarray:
    """float32 (T, V), as the MLX backend computes them."""
    loaded = backend.vox_load(LoadJob(folder, "fp32"), None)
    try:
        logits_TV: np.ndarray = loaded.logits(TOKENS_T)
    finally:
        loaded.close()
    return logits_TV
