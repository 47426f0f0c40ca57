"""Map a Hugging Face model to the metadata and the tensors of a GGUF file.

Names of tensors are those of the `gguf` package. What llama.cpp's graphs expect beyond names is
written here, family by family: rows of Q and K in pairs (llama), norms as 1 + w (gemma3),
transposed weights (gpt2), rotary factors as tensors (llama3, longrope), the experts of a layer as
one stack, gate and up apart. Settings that a family's graph in llama.cpp has built in are refused
where the model has others.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

Shape legend: H heads, D half a head, E experts, O output features, I input features.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import gguf
import numpy as np
from gguf import MODEL_ARCH, MODEL_TENSOR, ExpertGatingFuncType, GGUFWriter, RopeScalingType
from numpy.typing import NDArray

from vox_formats import FormatError

Array: TypeAlias = NDArray[Any]
Config: TypeAlias = Mapping[str, Any]

_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
_LINEAR_ROPE = frozenset({"default", "linear", "yarn"})
_FLOAT32 = ("_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")


def _same(array: Array) -> Array:
    return array


@dataclass(frozen=True, slots=True)
class Change:
    """Layout of a tensor in GGUF.

    Args:
        part: the view of a parameter (O, ...) that is in the tensor.
        apply: converts that view; `undo` is its inverse.
        rows: permutes the rows alone, which is all of it for B of a low-rank update.
    """

    part: Callable[[Array], Array] = _same
    apply: Callable[[Array], Array] = _same
    undo: Callable[[Array], Array] = _same
    rows: Callable[[Array], Array] = _same

    def of(self, parameter: Array) -> Array:
        return self.apply(self.part(parameter))


SAME = Change()
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


@dataclass(frozen=True, slots=True)
class Tensor:
    """The parameters behind a tensor of a GGUF file.

    Args:
        parameters: of the Hugging Face model; of a stack (E, ...) one for each expert.
        change: how each of them differs.
        is_stack: the parameters lie one after another, along a dimension of their own.
    """

    parameters: tuple[str, ...]
    change: Change
    is_stack: bool = False


Parts: TypeAlias = Mapping[str, Mapping[str, Change]]
"""Pattern of a parameter -> what stands in its place, one or several names -> layout."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One family in llama.cpp.

    Args:
        arch: llama.cpp's architecture.
        describe: writes the metadata that follow from the configuration.
        built_in: configuration -> values of settings that the graph has built in.
        change: parameter name, configuration -> how its tensor differs.
        rope: rotary scalings that the graph computes.
        factors: configuration -> tensors of rotary factors, by name in GGUF.
        parts: configuration -> parameters that have other names, or several tensors.
        windowed: the graph has the family's sliding window.
    """

    arch: MODEL_ARCH
    describe: Callable[[GGUFWriter, Config], None]
    built_in: Callable[[Config], Mapping[str, Any]] = lambda config: _SILU
    change: Callable[[str, Config], Change] = lambda name, config: SAME
    rope: frozenset[str] = _LINEAR_ROPE
    factors: Callable[[Config], Mapping[str, Array]] = lambda config: {}
    parts: Callable[[Config], Parts] = lambda config: _STACKED
    windowed: bool = False

    def tensors(self, parameters: Iterable[str], config: Config) -> dict[str, Tensor]:
        """Return name in GGUF -> the parameters behind the tensor.

        Layers beyond those of the model, which predict further tokens, are left out.

        Raises:
            FormatError: llama.cpp has no such tensors, or experts are missing.
        """
        table = gguf.get_tensor_name_map(self.arch, layers(config))
        made: dict[str, dict[int, tuple[str, Change]]] = {}
        faults = []
        for parameter, name, change in self._named(parameters, config):
            number = _EXPERT.search(name)
            found = table.get_name(_EXPERT.sub("", name), try_suffixes=(".weight", ".bias"))
            if found is None:
                faults.append(f"tensor {parameter}: unknown to llama.cpp")
            else:
                made.setdefault(found, {})[int(number[1]) if number else -1] = parameter, change
        tensors = {name: _in_order(numbered) for name, numbered in made.items()}
        if faults := faults or list(_missing_experts(tensors, config)):
            raise FormatError("llama.cpp cannot load these tensors", faults=faults)
        return tensors

    def _named(
        self, parameters: Iterable[str], config: Config
    ) -> Iterator[tuple[str, str, Change]]:
        """Yield parameter, name of the parameter or of a part of it, and layout."""
        parts = self.parts(config)
        for parameter in parameters:
            if _is_left_out(parameter, config):
                continue
            pattern = next((each for each in parts if re.search(each, parameter)), None)
            if pattern is None:
                yield parameter, parameter, self.change(parameter, config)
                continue
            for name, change in parts[pattern].items():
                yield parameter, re.sub(pattern, name, parameter), change

    def refusals(self, config: Config) -> Iterator[str]:
        """List what llama.cpp cannot compute of this model."""
        if (kind := _rope(config).get("rope_type", "default")) not in self.rope:
            yield f"rope_type {kind}, expected one of {', '.join(sorted(self.rope))}"
        for key, value in self.built_in(config).items():
            if (found := config.get(key, value)) != value:
                yield f"{key} {found}, expected {value}"

    def notes(self, config: Config) -> Iterator[str]:
        """List what llama.cpp computes otherwise."""
        size, longest = config.get("sliding_window"), config.get("max_position_embeddings")
        used = config.get("use_sliding_window", True) and not self.windowed
        if used and size is not None and (longest is None or size < longest):
            yield (
                f"llama.cpp leaves out this model's sliding window of {size} tokens: longer "
                "texts differ"
            )
        if rounds_yarn(config):
            yield (
                "llama.cpp rounds the bounds of YaRN's ramp, this model does not (truncate): its "
                "rotary frequencies differ"
            )

    def stays_float32(self, name: str, dimensions: int) -> bool:
        """Whether llama.cpp's kernels expect the tensor `name` in float32."""
        position = gguf.TENSOR_NAMES[MODEL_TENSOR.POS_EMBD]
        small = dimensions <= 1 or name.endswith(_FLOAT32)
        return small or not name.endswith(".weight") or name == f"{position}.weight"


def _is_left_out(parameter: str, config: Config) -> bool:
    layer = _LAYER.match(parameter)
    beyond = layer is not None and int(layer[1]) >= layers(config)
    head = parameter == "lm_head.weight" and tied(config)
    return beyond or head or parameter.endswith(_BUFFERS)


def _in_order(numbered: Mapping[int, tuple[str, Change]]) -> Tensor:
    parameters = tuple(numbered[number][0] for number in sorted(numbered))
    return Tensor(parameters, next(iter(numbered.values()))[1], -1 not in numbered)


def _missing_experts(tensors: Mapping[str, Tensor], config: Config) -> Iterator[str]:
    for name, tensor in tensors.items():
        if tensor.is_stack and (found := len(tensor.parameters)) != experts(config):
            yield f"tensor {name}: found {found} experts, expected {experts(config)}"


def rounds_yarn(config: Config) -> bool:
    """Whether llama.cpp rounds the bounds of YaRN's ramp, and the model does not."""
    rope = _rope(config)
    return rope["rope_type"] == "yarn" and rope.get("truncate") is False


def experts(config: Config) -> int:
    """Return the number of a mixture's experts; 0 for a dense model."""
    keys = "num_local_experts", "num_experts", "n_routed_experts"
    return next((int(config[key]) for key in keys if config.get(key)), 0)


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
    if count := experts(config):
        writer.add_expert_count(count)
    _keys(
        writer,
        config,
        num_experts_per_tok="expert_used_count",
        n_group="expert_group_count",
        topk_group="expert_group_used_count",
    )
    rope = _rope(config)
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
    if (scale := _rope(config).get("mscale_all_dim")) is not None:
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
    if _rope(config).get("long_factor"):
        writer.add_rope_scaling_attn_factors(_longrope_attention(config))


def _original_positions(config: Config) -> int:
    own = config.get("original_max_position_embeddings", config["max_position_embeddings"])
    return int(_rope(config).get("original_max_position_embeddings") or own)


def _phi3_rotated(config: Config) -> int:
    share = _rotated_share(config, 1.0)
    return int(share * config["hidden_size"]) // int(config["num_attention_heads"])


def _rotated_share(config: Config, default: float) -> float:
    key = "partial_rotary_factor"
    return float(_rope(config).get(key, config.get(key, default)))


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


FIRST = Change(part=lambda w: w[..., : w.shape[-2] // 2, :])
SECOND = Change(part=lambda w: w[..., w.shape[-2] // 2 :, :])

_STACKED: Parts = {
    r"\.experts\.gate_up_proj$": {
        ".experts.gate_proj.weight": FIRST,
        ".experts.up_proj.weight": SECOND,
    },
    r"\.experts\.down_proj$": {".experts.down_proj.weight": SAME},
    r"\.e_score_correction_bias$": {".e_score_correction.bias": SAME},
}
_GRANITE: Parts = {
    r"block_sparse_moe\.input_linear\.weight$": {
        "mlp.experts.gate_proj.weight": FIRST,
        "mlp.experts.up_proj.weight": SECOND,
    },
    r"shared_mlp\.input_linear\.weight$": {
        "mlp.shared_experts.gate_proj.weight": FIRST,
        "mlp.shared_experts.up_proj.weight": SECOND,
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
    return {**_STACKED, r"\.kv_b_proj\.weight$": split}


# --- what the graphs have built in ----------------------------------------------------------------

_SILU: Mapping[str, Any] = {"hidden_act": "silu"}
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
    return {**_SILU, "no_rope_layers": [int(n % 4 != 3) for n in range(layers(config))]}


def _qwen2_moe_built_in(config: Config) -> Mapping[str, Any]:
    return {**_SILU, **_EVERY_LAYER, "norm_topk_prob": False, "tie_word_embeddings": False}


def _qwen3_moe_built_in(config: Config) -> Mapping[str, Any]:
    return {**_SILU, **_EVERY_LAYER, "norm_topk_prob": True, "attention_bias": False}


def _olmoe_built_in(config: Config) -> Mapping[str, Any]:
    return {
        **_SILU,
        "norm_topk_prob": False,
        "num_key_value_heads": config["num_attention_heads"],
        "clip_qkv": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _gpt_oss_built_in(config: Config) -> Mapping[str, Any]:
    kinds = "sliding_attention", "full_attention"
    return {
        **_SILU,
        "layer_types": [kinds[n % 2] for n in range(layers(config))],
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
    }


def _deepseek_v3_built_in(config: Config) -> Mapping[str, Any]:
    rope, size = dict(_rope(config)), (layers(config), config["vocab_size"])
    if rope["rope_type"] == "yarn":  # one scale of attention, for all dimensions
        scale = rope.get("mscale_all_dim", 1.0)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    # llama.cpp knows the models without a compressed query by their size.
    whole = size[0] in (26, 27) or size == (48, 128256)
    return {
        **_SILU,
        "rope_parameters": rope,
        "q_lora_rank": None if whole else config.get("q_lora_rank") or "a number",
        "rope_interleave": True,
        "attention_bias": False,
    }


_LLAMA = Layout(
    MODEL_ARCH.LLAMA,
    _llama,
    change=_llama_change,
    rope=_LINEAR_ROPE | {"llama3"},
    factors=_llama3_factors,
)

LAYOUTS: Mapping[str, Layout] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
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
