"""Tiny models of every family that vox is tested on: random weights, real architecture.

A folder made here is a complete Hugging Face model folder: configuration, safetensors, a
byte-level tokenizer (one token per byte and four special ones) and a ChatML template. It needs
`torch` and `transformers` when called, nothing when imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 260
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": VOCABULARY - 1,
    "eos_token_id": VOCABULARY - 2,
    "pad_token_id": VOCABULARY - 4,
    # The default range of 0.02 makes logits too flat to notice a broken model.
    "initializer_range": 0.2,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": VOCABULARY - 1,
    "eos_token_id": VOCABULARY - 2,
    "initializer_range": 0.2,
}
_LINEAR_ATTENTION = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_ALTERNATING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "mistral": ("mistral", {**_COMMON, "sliding_window": 16}),
    "qwen2": ("qwen2", {**_COMMON, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", _COMMON),
    "qwen3_5": ("qwen3_5_text", {**_COMMON, **_LINEAR_ATTENTION}),
    "gemma3": ("gemma3_text", {**_COMMON, **_ALTERNATING, "query_pre_attn_scalar": 8}),
    "gpt2": ("gpt2", _GPT2),
    "phi3": ("phi3", _COMMON),
}
"""Family -> `model_type` and configuration."""

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": (  # more experts than one digit counts
        "qwen2_moe",
        {**_COMMON, **_EXPERTS, "num_experts": 12, "shared_expert_intermediate_size": 24},
    ),
    "mixtral": ("mixtral", {**_COMMON, **_LOCAL}),
    "gpt_oss": ("gpt_oss", {**_COMMON, **_LOCAL, **_ALTERNATING}),
    "granitemoe": ("granitemoe", {**_COMMON, **_LOCAL}),
    "glm4_moe": ("glm4_moe", {**_COMMON, **_ROUTED}),
}
"""Mixtures of experts, as `FAMILIES`: stored one by one with a shared expert, under another block's
name, as stacks, as stacks under other names, and below a dense layer."""

_AWAY: dict[str, Any] = {"rms_norm_eps": 1e-3, "rope_theta": 50_000.0}
AWAY: dict[str, dict[str, Any]] = {
    **{family: {**_AWAY, "head_dim": 16} for family in FAMILIES},
    "qwen2": _AWAY,  # attention_bias is always on, head_dim is no setting
    "phi3": _AWAY,
    "gpt2": {"layer_norm_epsilon": 1e-3},
}
"""Family -> settings away from the defaults, which a backend could otherwise ignore unseen."""


def make_model(
    family: str,
    folder: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    shard: str = "1GB",
    spread: float | None = None,
    away: bool = False,
) -> Path:
    """Make a tiny model of `family` in `folder`, and return the folder.

    Args:
        dtype: torch's name of the dtype the weights are stored in.
        shard: largest size of a safetensors file, as transformers writes sizes.
        spread: standard deviation of the weights, instead of the family's default here.
        away: with the settings of `AWAY`, and norms and biases drawn around their initial values.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type, settings = {**FAMILIES, **MIXTURES}[family]
    if spread is not None:
        settings = {**settings, "initializer_range": spread}
    if away:
        settings = {**settings, **AWAY[family]}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings))  # type: ignore[no-untyped-call]
        if away:
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.data += 0.2 * torch.randn_like(parameter)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write an untrained byte-level tokenizer with a ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, _, end, bos = SPECIAL
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "eos_token": end,
        "bos_token": bos,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
