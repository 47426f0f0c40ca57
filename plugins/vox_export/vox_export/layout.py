"""Map a Hugging Face model to the metadata and the tensors of a GGUF file.

Names of tensors are those of the `gguf` package. What llama.cpp's graphs expect beyond names is
written here, family by family: rows of Q and K in pairs (llama), norms as 1 + w (gemma3),
transposed weights (gpt2), rotary factors as tensors (llama3, longrope). What a family's graph in
llama.cpp cannot compute is refused, and what it leaves out is a note.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

Shape legend: H heads, D half a head, O output features, I input features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import gguf
import numpy as np
from gguf import MODEL_ARCH, MODEL_TENSOR, GGUFWriter, RopeScalingType
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Config: TypeAlias = Mapping[str, Any]

_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_LINEAR_ROPE = frozenset({"default", "linear", "yarn"})


@dataclass(frozen=True, slots=True)
class Change:
    """Layout of a tensor in GGUF: `apply` converts (O, ...) as stored, `undo` is its inverse, and
    `rows` permutes the rows alone, which is all of it for B of a low-rank update."""

    apply: Callable[[Array], Array]
    undo: Callable[[Array], Array]
    rows: Callable[[Array], Array]


def _same(array: Array) -> Array:
    return array


SAME = Change(_same, _same, _same)
TRANSPOSED = Change(lambda w: w.T, lambda w: w.T, _same)
ONE_MORE = Change(lambda w: w + np.float32(1), lambda w: w - np.float32(1), _same)


def in_pairs(heads: int) -> Change:
    """Rows of each head from (a0 a1 … b0 b1 …) to (a0 b0 a1 b1 …)."""

    def apply(rows: Array) -> Array:
        rows_H2D = rows.reshape(heads, 2, -1, *rows.shape[1:])
        return rows_H2D.swapaxes(1, 2).reshape(rows.shape)

    def undo(rows: Array) -> Array:
        rows_HD2 = rows.reshape(heads, -1, 2, *rows.shape[1:])
        return rows_HD2.swapaxes(1, 2).reshape(rows.shape)

    return Change(apply, undo, apply)


@dataclass(frozen=True, slots=True)
class Layout:
    """One family in llama.cpp.

    Args:
        arch: llama.cpp's architecture.
        describe: writes the metadata that follow from the configuration.
        change: parameter name, configuration -> how its tensor differs.
        rope: rotary scalings that the graph computes.
        faults: configuration -> what else the graph cannot compute.
        factors: configuration -> tensors of rotary factors, by name in GGUF.
    """

    arch: MODEL_ARCH
    describe: Callable[[GGUFWriter, Config], None]
    change: Callable[[str, Config], Change] = lambda name, config: SAME
    rope: frozenset[str] = _LINEAR_ROPE
    faults: Callable[[Config], Iterable[str]] = lambda config: ()
    factors: Callable[[Config], Mapping[str, Array]] = lambda config: {}

    def names(self, parameters: Iterable[str], config: Config) -> dict[str, str]:
        """Return parameter name -> name in GGUF.

        Raises:
            KeyError: llama.cpp has no such tensor.
        """
        table = gguf.get_tensor_name_map(self.arch, layers(config))
        named = {}
        for name in parameters:
            if name.endswith(_BUFFERS) or (name == "lm_head.weight" and tied(config)):
                continue
            found = table.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise KeyError(name)
            named[name] = found
        return named

    def refusals(self, config: Config) -> Iterator[str]:
        """List what llama.cpp cannot compute of this model."""
        if (kind := _rope(config).get("rope_type", "default")) not in self.rope:
            yield f"rope_type {kind}, expected one of {', '.join(sorted(self.rope))}"
        yield from self.faults(config)

    def stays_float32(self, name: str, dimensions: int) -> bool:
        """Whether llama.cpp's kernels expect the tensor `name` in float32."""
        position = gguf.TENSOR_NAMES[MODEL_TENSOR.POS_EMBD]
        small = dimensions <= 1 or name.endswith("_norm.weight")
        return small or not name.endswith(".weight") or name == f"{position}.weight"


def layers(config: Config) -> int:
    return int(config.get("num_hidden_layers", config.get("n_layer", 0)))


def tied(config: Config) -> bool:
    return bool(config.get("tie_word_embeddings"))


def is_vocabulary(name: str) -> bool:
    """Whether the tensor `name` of a GGUF file is the embedding or the output head."""
    return name in ("token_embd.weight", "output.weight")


# --- metadata -------------------------------------------------------------------------------------


def _rope(config: Config) -> Mapping[str, Any]:
    """Return the rotary settings of full attention, whichever release wrote them."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = dict(given.get("full_attention") or given)
    found.setdefault("rope_type", found.get("type", "default"))
    found.setdefault("rope_theta", config.get("rope_theta"))
    return found


def _common(writer: GGUFWriter, config: Config) -> None:
    """Write what every family with rotary embeddings has."""
    writer.add_block_count(layers(config))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = _rope(config)
    if rope["rope_theta"] is not None:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        _scaling(writer, rope)


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
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


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
    if _rope(config).get("long_factor"):
        writer.add_rope_scaling_attn_factors(_longrope_attention(config))


def _original_positions(config: Config) -> int:
    own = config.get("original_max_position_embeddings", config["max_position_embeddings"])
    return int(_rope(config).get("original_max_position_embeddings") or own)


def _phi3_rotated(config: Config) -> int:
    share = _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return int(share * config["hidden_size"]) // int(config["num_attention_heads"])


def _longrope_attention(config: Config) -> float:
    before = _original_positions(config)
    longer: float = config["max_position_embeddings"] / before
    return math.sqrt(1 + math.log(longer) / math.log(before)) if longer > 1 else 1.0


# --- tensors --------------------------------------------------------------------------------------


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
    rope = _rope(config)
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
    rope = _rope(config)
    return {
        f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], np.float32)
        for kind in ("long", "short")
        if rope.get("long_factor")
    }


# --- what cannot be computed ----------------------------------------------------------------------


def _activation(config: Config, expected: str) -> Iterator[str]:
    key = next((k for k in ("hidden_act", "hidden_activation") if config.get(k)), "hidden_act")
    if (found := config.get(key, expected)) != expected:
        yield f"{key} {found}, expected {expected}"


def _silu(config: Config) -> Iterator[str]:
    yield from _activation(config, "silu")


def _gemma3_faults(config: Config) -> Iterator[str]:
    yield from _activation(config, "gelu_pytorch_tanh")
    count = layers(config)
    expected = ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(count)]
    if (found := config.get("layer_types", expected)) != expected:
        yield f"layer_types {found}, expected every sixth layer with full attention"
    # llama.cpp knows the 27B model by its layers, and takes 1/sqrt(head size) for all others.
    size = config["hidden_size"] / config["num_attention_heads"]
    scalar = size if count == 62 else config["head_dim"]
    if config.get("query_pre_attn_scalar", scalar) != scalar:
        yield f"query_pre_attn_scalar {config['query_pre_attn_scalar']}, expected {scalar}"
    if config.get("attn_logit_softcapping"):
        yield "attn_logit_softcapping is set"


def _gpt2_faults(config: Config) -> Iterator[str]:
    if (found := config.get("activation_function", "gelu_new")) != "gelu_new":
        yield f"activation_function {found}, expected gelu_new"
    if (inner := config.get("n_inner")) not in (None, 4 * config["n_embd"]):
        yield f"n_inner {inner}, expected {4 * config['n_embd']}"
    if config.get("scale_attn_by_inverse_layer_idx") or not config.get("scale_attn_weights", True):
        yield "attention is scaled otherwise than by 1/sqrt(head size)"


def _smollm3_faults(config: Config) -> Iterator[str]:
    yield from _silu(config)
    expected = [int(n % 4 != 3) for n in range(layers(config))]
    if (found := config.get("no_rope_layers", expected)) != expected:
        yield f"no_rope_layers {found}, expected every fourth layer without rotary embedding"


_LLAMA = Layout(
    MODEL_ARCH.LLAMA, _llama, _llama_change, _LINEAR_ROPE | {"llama3"}, _silu, _llama3_factors
)

LAYOUTS: Mapping[str, Layout] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Layout(MODEL_ARCH.QWEN2, _with_head_size, faults=_silu),
    "qwen3": Layout(MODEL_ARCH.QWEN3, _with_head_size, faults=_silu),
    "gemma3_text": Layout(
        MODEL_ARCH.GEMMA3,
        _gemma3,
        _gemma3_change,
        frozenset({"default", "linear"}),
        _gemma3_faults,
    ),
    "gpt2": Layout(MODEL_ARCH.GPT2, _gpt2, _gpt2_change, faults=_gpt2_faults),
    "phi3": Layout(
        MODEL_ARCH.PHI3,
        _phi3,
        rope=frozenset({"default", "longrope"}),
        faults=_silu,
        factors=_phi3_factors,
    ),
    "granite": Layout(MODEL_ARCH.GRANITE, _granite, _llama_change, faults=_silu),
    "smollm3": Layout(
        MODEL_ARCH.SMOLLM3,
        _llama,
        _llama_change,
        _LINEAR_ROPE | {"llama3"},
        _smollm3_faults,
        _llama3_factors,
    ),
}
"""`model_type` -> layout."""
