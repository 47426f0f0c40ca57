"""What llama.cpp names and changes when it writes a model, undone for each family.

llama: the rows of Q and K are reordered for its rotary embedding, which turns neighbouring pairs
where Hugging Face's turns halves. gemma3: every norm is stored as 1 + w. Otherwise only names
differ. What a GGUF leaves out, because llama.cpp knows it of the family, is filled in here.

Config keys are those of the models' own `config.json`, which transformers and mlx-lm both read.

Shape legend: H heads, D half a head, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_core.gguf.source import GgufSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

_ALL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of llama.cpp.

    Args:
        layer: tensor of a layer in GGUF -> module of a layer in transformers.
        config: metadata -> the family's own keys of `config.json`.
        read: source, name in GGUF, config -> the tensor in bfloat16, as transformers has it.
        tokenizers: values of (tokenizer.ggml.model, tokenizer.ggml.pre) that belong to it.
    """

    layer: Mapping[str, str]
    config: Callable[[GgufSource], dict[str, Any]]
    read: Callable[[GgufSource, str, Mapping[str, Any]], Array]
    tokenizers: frozenset[tuple[str, str]]

    def names(self, source: GgufSource, layers: int) -> dict[str, str]:
        """Tensor in GGUF -> tensor in transformers: what the file must have, no more, no less."""
        names = dict(_ALL)
        if "output.weight" in source.tensors:
            names["output.weight"] = "lm_head.weight"
        for layer in range(layers):
            for theirs, ours in self.layer.items():
                names[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
        return names


def _common(source: GgufSource, arch: str) -> dict[str, Any]:
    """The keys of `config.json` that every family has."""
    heads = source.value(f"{arch}.attention.head_count")
    hidden = source.value(f"{arch}.embedding_length")
    ids = {
        f"{name}_token_id": source.value(f"tokenizer.ggml.{theirs}_token_id")
        for name, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        **{key: value for key, value in ids.items() if value is not None},
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": source.value(f"{arch}.feed_forward_length"),
        "max_position_embeddings": source.value(f"{arch}.context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": source.value(f"{arch}.block_count"),
        "num_key_value_heads": source.value(f"{arch}.attention.head_count_kv", heads),
        "head_dim": source.value(f"{arch}.attention.key_length", hidden // heads),
        "rms_norm_eps": source.value(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "vocab_size": source.tensors["token_embd.weight"][0],
    }
    if (factor := _linear_factor(source, arch)) not in (0.0, 1.0):
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return config


def _linear_factor(source: GgufSource, arch: str) -> float:
    """Linear is what llama.cpp takes where no type is named; older files have the older key."""
    if source.value(f"{arch}.rope.scaling.type", "linear") != "linear":
        return 1.0
    older = source.value(f"{arch}.rope.scale_linear", 1.0)
    return float(source.value(f"{arch}.rope.scaling.factor", older))


# --- llama ----------------------------------------------------------------------------------------


def _llama_config(source: GgufSource) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_common(source, "llama"),
        "attention_bias": False,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_theta": source.value("llama.rope.freq_base", 10000.0),
    }


def _llama_read(source: GgufSource, name: str, config: Mapping[str, Any]) -> Array:
    tensor = source.read(name)
    if name.endswith(".attn_q.weight"):
        return halves_from_pairs(tensor, config["num_attention_heads"])
    if name.endswith(".attn_k.weight"):
        return halves_from_pairs(tensor, config["num_key_value_heads"])
    return tensor


def halves_from_pairs(rows: Array, heads: int) -> Array:
    """Rows of each head from (a0 b0 a1 b1 …), as llama.cpp has them, to (a0 a1 … b0 b1 …)."""
    pairs_HD2I = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs_HD2I.swapaxes(1, 2).reshape(rows.shape)


# --- gemma3 ---------------------------------------------------------------------------------------


def _gemma3_config(source: GgufSource) -> dict[str, Any]:
    config = _common(source, "gemma3")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **config,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma3_query_scalar(config),
        "rope_local_base_freq": 10000.0,
        "rope_theta": source.value("gemma3.rope.freq_base", 1000000.0),
        "sliding_window": source.value("gemma3.attention.sliding_window"),
        "sliding_window_pattern": 6,
    }


def _gemma3_query_scalar(config: Mapping[str, Any]) -> int:
    """The file does not say; llama.cpp, too, knows the 27B model by its 62 layers."""
    if config["num_hidden_layers"] == 62:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma3_read(source: GgufSource, name: str, config: Mapping[str, Any]) -> Array:
    return source.read(name, offset=-1.0 if name.endswith("_norm.weight") else 0.0)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        layer={**_LAYER, "ffn_norm": "post_attention_layernorm"},
        config=_llama_config,
        read=_llama_read,
        tokenizers=frozenset({("gpt2", "smollm"), ("gpt2", "gpt-2")}),
    ),
    "gemma3": Family(
        layer={
            **_LAYER,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config=_gemma3_config,
        read=_gemma3_read,
        tokenizers=frozenset({("llama", "default")}),
    ),
}
