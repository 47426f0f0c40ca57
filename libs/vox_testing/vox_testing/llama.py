"""A tiny Llama in numpy: its files, and its logits in float64.

The conformance suite trains this model and compares a backend with these logits, so the suite needs
no tensor library but the backend's own. `CONFIGURATIONS` are models away from the defaults: a
setting that has its default value in every test may be ignored. test_suite.py compares the logits
with transformers'.

    x <- x + attention(norm(x))        x <- x + down(silu(gate(norm(x))) * up(norm(x)))

Llama: Touvron et al. 2023 (arXiv:2302.13971); grouped queries: Ainslie et al. (arXiv:2305.13245);
rotary positions: Su et al. (arXiv:2104.09864), in the halved layout of Hugging Face.

Shape legend: T tokens, V vocabulary, H hidden size, N heads, K key heads, D size of a head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vox_core.adapter.initial import generator
from vox_core.weights import WEIGHTS, numpy_dtype, write_safetensors
from vox_testing.tiny import VOCABULARY, write_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.contract import Ints

Doubles: TypeAlias = "NDArray[np.float64]"

# Widths are multiples of 64, the group that quantised formats share a scale in.
HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, HEAD = 64, 128, 2, 4, 2, 16
EPSILON, THETA = 1e-6, 10000.0
POSITIONS = 512

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": POSITIONS,
    "hidden_act": "silu",
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": VOCABULARY - 1,
    "eos_token_id": VOCABULARY - 2,
    "pad_token_id": VOCABULARY - 4,
}


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_theta": 100000.0},
    "theta in rope_parameters": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "linear rope_scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3 rope_scaling": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "scaling in rope_parameters": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
    },
    "head_dim": {"head_dim": 2 * HEAD},
    "no head_dim": {"head_dim": None},
    "one key head": {"num_key_value_heads": 1},
    "rms_norm_eps": {"rms_norm_eps": 1e-2},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "tied embeddings": {"tie_word_embeddings": True},
    "hidden_act": {"hidden_act": "gelu_pytorch_tanh"},
}
"""What differs from `CONFIG`; None removes a key."""


def write_llama(
    folder: Path,
    *,
    dtype: str = "F32",
    seed: int = 0,
    norms: float = 1.0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a complete model folder, and return it.

    Args:
        dtype: safetensors' name of the weights' dtype.
        norms: mean of the norms' weights.
        config: what differs from `CONFIG`; None removes a key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[dtype]
    written = {**CONFIG, "dtype": name, "torch_dtype": name, **(config or {})}
    written = {key: value for key, value in written.items() if value is not None}
    shapes = _shapes(written)
    tensors = {name: _draw(name, shape, seed, norms) for name, shape in shapes.items()}
    write_safetensors(
        folder / WEIGHTS,
        {name: (dtype, shape) for name, shape in shapes.items()},
        ((name, value.astype(numpy_dtype(dtype))) for name, value in tensors.items()),
    )
    (folder / "config.json").write_text(json.dumps(written))
    write_tokenizer(folder)
    return folder


def llama_logits(
    weights: Mapping[str, Doubles], tokens_T: Ints, config: Mapping[str, Any] = CONFIG
) -> Doubles:
    """Compute float64 logits (T, V) of a document.

    Args:
        weights: parameter name -> float64 tensor.
        config: their `config.json`.
    """
    embedding_VH = weights["model.embed_tokens.weight"]
    x_TH, epsilon = embedding_VH[tokens_T], config["rms_norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {
            name.removeprefix(prefix): value
            for name, value in weights.items()
            if name.startswith(prefix)
        }
        y_TH = _norm(x_TH, own["input_layernorm.weight"], epsilon)
        x_TH = x_TH + _attention(own, y_TH, config)
        y_TH = _norm(x_TH, own["post_attention_layernorm.weight"], epsilon)
        x_TH = x_TH + _mlp(own, y_TH, config["hidden_act"])
    head_VH = weights.get("lm_head.weight", embedding_VH)
    return _norm(x_TH, weights["model.norm.weight"], epsilon) @ head_VH.T


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    size = _head_size(config)
    queries = config["num_attention_heads"] * size
    keys = config["num_key_value_heads"] * size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}.weight"] = shape
            owner = "attention_bias" if name.startswith("self_attn") else "mlp_bias"
            if len(shape) == 2 and config[owner]:
                shapes[f"model.layers.{number}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (HIDDEN,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return shapes


def _draw(name: str, shape: tuple[int, ...], seed: int, norms: float) -> Doubles:
    """Draw weights with enough spread that a broken model's logits differ clearly."""
    noise: Doubles = 0.2 * generator("llama", seed, name).standard_normal(shape)
    return norms * (1 + noise) if name.endswith("norm.weight") else noise


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or HIDDEN // config["num_attention_heads"])


def _norm(x_TH: Doubles, weight_H: Doubles, epsilon: float) -> Doubles:
    y_TH: Doubles = weight_H * x_TH / np.sqrt((x_TH**2).mean(-1, keepdims=True) + epsilon)
    return y_TH


def _linear(own: Mapping[str, Doubles], name: str, x_TI: Doubles) -> Doubles:
    y_TO: Doubles = x_TI @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)
    return y_TO


def _mlp(own: Mapping[str, Doubles], x_TH: Doubles, activation: str) -> Doubles:
    gate = _linear(own, "mlp.gate_proj", x_TH)
    if activation == "silu":
        active = gate / (1 + np.exp(-gate))
    else:  # GELU by tanh (Hendrycks & Gimpel, arXiv:1606.08415)
        active = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return _linear(own, "mlp.down_proj", active * _linear(own, "mlp.up_proj", x_TH))


def _attention(own: Mapping[str, Doubles], x_TH: Doubles, config: Mapping[str, Any]) -> Doubles:
    length, size = len(x_TH), _head_size(config)

    def heads(name: str) -> Doubles:
        y_TX = _linear(own, f"self_attn.{name}", x_TH)
        y_NTD: Doubles = y_TX.reshape(length, -1, size).swapaxes(0, 1)
        return y_NTD

    repeats = config["num_attention_heads"] // config["num_key_value_heads"]
    q_NTD = _rotate(heads("q_proj"), config)
    k_NTD = _rotate(heads("k_proj"), config).repeat(repeats, axis=0)
    v_NTD = heads("v_proj").repeat(repeats, axis=0)
    scores_NTT = q_NTD @ k_NTD.swapaxes(1, 2) / np.sqrt(size)
    scores_NTT[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    shares_NTT = np.exp(scores_NTT - scores_NTT.max(-1, keepdims=True))
    shares_NTT /= shares_NTT.sum(-1, keepdims=True)
    seen_TH = (shares_NTT @ v_NTD).swapaxes(0, 1).reshape(length, -1)
    return _linear(own, "self_attn.o_proj", seen_TH)


def _rotate(x_NTD: Doubles, config: Mapping[str, Any]) -> Doubles:
    frequencies = _frequencies(x_NTD.shape[-1], config)
    angles_TD = np.tile(np.outer(np.arange(x_NTD.shape[1]), frequencies), 2)
    first, second = np.split(x_NTD, 2, axis=-1)
    turned_NTD = np.concatenate([-second, first], axis=-1)
    y_NTD: Doubles = x_NTD * np.cos(angles_TD) + turned_NTD * np.sin(angles_TD)
    return y_NTD


def _frequencies(size: int, config: Mapping[str, Any]) -> Doubles:
    """Return the rotary frequencies, in either spelling of the configuration."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", THETA))
    frequencies: Doubles = theta ** (-np.arange(0, size, 2) / size)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    slowed: Doubles = frequencies / scaling["factor"]
    if kind == "linear":
        return slowed
    # llama3: positions of long wavelengths are interpolated, those of short ones stay.
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    y: Doubles = (1 - kept) * slowed + kept * frequencies
    return y
