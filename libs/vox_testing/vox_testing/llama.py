"""A tiny Llama in numpy: its files, and its logits in float64.

The conformance suite trains this model and compares a backend with these logits, so the suite needs
no tensor library but the backend's own. test_suite.py compares the logits with transformers'.

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

    Doubles: TypeAlias = NDArray[np.float64]

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


def write_llama(folder: Path, *, dtype: str = "F32", seed: int = 0) -> Path:
    """Write a complete model folder, and return it.

    Args:
        dtype: safetensors' name of the weights' dtype.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes = _shapes()
    tensors = {name: _draw(name, shape, seed) for name, shape in shapes.items()}
    write_safetensors(
        folder / WEIGHTS,
        {name: (dtype, shape) for name, shape in shapes.items()},
        ((name, value.astype(numpy_dtype(dtype))) for name, value in tensors.items()),
    )
    name = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[dtype]
    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": name, "torch_dtype": name}))
    write_tokenizer(folder)
    return folder


def llama_logits(
    weights: Mapping[str, Doubles], tokens_T: Ints, config: Mapping[str, Any] = CONFIG
) -> Doubles:
    """Compute float64 logits (T, V) of a document, for any Llama without rotary scaling.

    Args:
        weights: parameter name -> float64 tensor.
        config: their `config.json`.
    """
    x_TH = weights["model.embed_tokens.weight"][tokens_T]
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x_TH = x_TH + _attention(own, _norm(x_TH, own["input_layernorm.weight"]), config)
        x_TH = x_TH + _mlp(own, _norm(x_TH, own["post_attention_layernorm.weight"]))
    return _norm(x_TH, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _shapes() -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * HEAD, KEY_HEADS * HEAD
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
    return {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        **{
            f"model.layers.{number}.{name}.weight": shape
            for number in range(LAYERS)
            for name, shape in layer.items()
        },
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Doubles:
    """Draw weights with enough spread that a broken model's logits differ clearly."""
    noise: Doubles = 0.2 * generator("llama", seed, name).standard_normal(shape)
    return 1 + noise if len(shape) == 1 else noise


def _norm(x_TH: Doubles, weight_H: Doubles) -> Doubles:
    y_TH: Doubles = weight_H * x_TH / np.sqrt((x_TH**2).mean(-1, keepdims=True) + EPSILON)
    return y_TH


def _mlp(own: Mapping[str, Doubles], x_TH: Doubles) -> Doubles:
    gate = x_TH @ own["mlp.gate_proj.weight"].T
    inner = gate / (1 + np.exp(-gate)) * (x_TH @ own["mlp.up_proj.weight"].T)
    y_TH: Doubles = inner @ own["mlp.down_proj.weight"].T
    return y_TH


def _attention(own: Mapping[str, Doubles], x_TH: Doubles, config: Mapping[str, Any]) -> Doubles:
    length, size = len(x_TH), config["head_dim"]

    def heads(name: str) -> Doubles:
        y_TX = x_TH @ own[f"self_attn.{name}.weight"].T
        y_NTD: Doubles = y_TX.reshape(length, -1, size).swapaxes(0, 1)
        return y_NTD

    repeats = config["num_attention_heads"] // config["num_key_value_heads"]
    q_NTD = _rotate(heads("q_proj"))
    k_NTD = _rotate(heads("k_proj")).repeat(repeats, axis=0)
    v_NTD = heads("v_proj").repeat(repeats, axis=0)
    scores_NTT = q_NTD @ k_NTD.swapaxes(1, 2) / np.sqrt(size)
    scores_NTT[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    shares_NTT = np.exp(scores_NTT - scores_NTT.max(-1, keepdims=True))
    shares_NTT /= shares_NTT.sum(-1, keepdims=True)
    seen_TH = (shares_NTT @ v_NTD).swapaxes(0, 1).reshape(length, -1)
    y_TH: Doubles = seen_TH @ own["self_attn.o_proj.weight"].T
    return y_TH


def _rotate(x_NTD: Doubles) -> Doubles:
    size = x_NTD.shape[-1]
    frequencies = THETA ** (-np.arange(0, size, 2) / size)
    angles_TD = np.tile(np.outer(np.arange(x_NTD.shape[1]), frequencies), 2)
    first, second = np.split(x_NTD, 2, axis=-1)
    turned_NTD = np.concatenate([-second, first], axis=-1)
    y_NTD: Doubles = x_NTD * np.cos(angles_TD) + turned_NTD * np.sin(angles_TD)
    return y_NTD
