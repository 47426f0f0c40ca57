"""Translate settings and names between Hugging Face models and mlx-lm's.

**Settings.** mlx-lm reads `config.json` in the words of the time when a family was added: it takes
a default where transformers 5 writes the same thing under another name (`rope_parameters`), has
scaled rotary embeddings in some families only, and leaves the sliding window out of a few. Each
would be another model, silently. `mlx_config` translates or refuses; `window` says how far a model
may see that mlx-lm would let see everything. tests/parity/test_mlx_config.py holds both against
transformers. Whether mlx-lm has a family at all, and reads its other settings, is the MLX backend's
to say.

**Names.** The rule is "the same path". `FAMILIES` holds the differences, one row per `model_type`:
beginnings of paths, read from `sanitize` and the module tree of mlx-lm's models. Paths of modules
and names of parameters begin alike, so both can be translated. What mlx-lm leaves out (a vision
tower) or stores with other values (the norms of Qwen3.5) has no counterpart; `counterpart_fault`
says so. `expert_names` says which experts lie in one of mlx-lm's stacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vox_formats import FormatError

# --- settings -------------------------------------------------------------------------------------

# Families where mlx-lm scales the rotary embedding as transformers does, and the kinds. Keys beyond
# these change what transformers computes and are not read.
_SCALED = (
    "gemma3_text",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
)
_KINDS: dict[str, frozenset[str]] = {
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset({"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"}),
}
# `default` is no scaling; `mrope` tells images from text, and for text alone is none either.
_UNSCALED = ("default", "mrope")
_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_MROPE = {"mrope_section", "mrope_interleaved"}

# Families whose sliding window mlx-lm has; vox puts Mistral's in.
_WITH_WINDOW = ("cohere2", "gemma3_text", "gpt_oss", "mistral", "olmo3")


def mlx_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with mlx-lm's names added for settings that it names differently.

    Raises:
        FormatError: a setting that mlx-lm would interpret differently.
    """
    adapted = {**config, **_text(config)}
    if isinstance(nested := config.get("text_config"), dict):
        adapted["text_config"] = {**nested, **_text(nested)}
        if "vocab_size" in nested:  # gemma3's wrapper has one of its own
            adapted.setdefault("vocab_size", nested["vocab_size"])
    if config.get("model_type") == "qwen3_5_text":
        adapted["model_type"] = "qwen3_5"
    return adapted


def misread(config: Mapping[str, Any]) -> list[str]:
    """Return the settings that mlx-lm without `mlx_config` would interpret differently.

    Raises:
        FormatError: as `mlx_config`.
    """
    text = config.get("text_config") or config
    words = _text(text)
    found = [
        f"{key} = {value!r}" for key, value in words.items() if text.get(key, _ABSENT) != value
    ]
    if text.get("model_type") == "mistral" and text.get("sliding_window"):
        found.append(f"sliding_window = {text['sliding_window']}")
    return found


_ABSENT = object()


def window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window of a layer that mlx-lm would ignore."""
    text = config.get("text_config") or config
    kind, size = text.get("model_type"), text.get("sliding_window")
    if (
        kind in _WITH_WINDOW
        or not isinstance(size, int)
        or not text.get("use_sliding_window", True)
    ):
        return None
    return size


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the renamed settings of a language model's configuration."""
    kind = str(config.get("model_type"))
    changed = _rope(kind, config)
    if kind == "gpt2":
        changed["n_ctx"] = config.get("n_ctx", config.get("n_positions"))
    if kind == "glm4_moe":
        changed.setdefault("rope_scaling", config.get("rope_scaling"))
    if kind == "qwen3_moe" and "num_local_experts" in config:
        changed["num_experts"] = config["num_local_experts"]
    if kind == "gemma3_text" and config.get("layer_types"):
        changed["sliding_window_pattern"] = _period(config["layer_types"])
    return changed


def _rope(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    written = config.get("rope_parameters")
    if not isinstance(written, dict):
        scaling = config.get("rope_scaling")
        _kind(family, scaling if isinstance(scaling, dict) else {})
        return {}
    if "full_attention" in written:
        whole, local = written["full_attention"], written.get("sliding_attention", {})
        _kind("the sliding layers", local)
        changed = _rope(family, {"rope_parameters": whole})
        if family == "gemma3_text" and "rope_theta" in local:
            return {**changed, "rope_local_base_freq": local["rope_theta"]}
        if local.get("rope_theta", whole.get("rope_theta")) != whole.get("rope_theta"):
            raise _unlike(f"another rope_theta for the sliding layers in {family}")
        return changed
    changed = {
        key: written[key] for key in ("rope_theta", "partial_rotary_factor") if key in written
    }
    if (kind := _kind(family, written)) not in _UNSCALED:
        scaling = {key: value for key, value in written.items() if key != "rope_theta"}
        changed["rope_scaling"] = {**scaling, "type": kind}
    return changed


def _kind(family: str, scaling: Mapping[str, Any]) -> str:
    """Return the kind of rotary embedding, if mlx-lm computes it as transformers does."""
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    read = _KINDS.get(kind, frozenset()) if family in _SCALED else frozenset()
    if read and family == "gpt_oss":
        read |= {"truncate"}  # which vox_mlx puts in
    if kind in _UNSCALED:
        read = frozenset(_MROPE)
    set_keys = {key for key, value in scaling.items() if value is not None}
    if (kind in _UNSCALED or read) and not (strange := set_keys - read - _ALWAYS):
        return kind
    details = f" with {', '.join(sorted(strange))}" if read else ""
    raise _unlike(f"{kind} in {family}{details}")


def _unlike(found: str) -> FormatError:
    return FormatError(
        "the model's rotary embedding is not one that mlx-lm computes as transformers does",
        found=found,
        expected=f"no scaling; or one of {', '.join(_KINDS)} in {', '.join(_SCALED)}",
    )


def _period(layer_types: list[str]) -> int:
    """Return every how many layers one has global attention, in mlx-lm's form."""
    full = [i for i, kind in enumerate(layer_types, 1) if kind == "full_attention"]
    period = full[0] if full else 0
    if not period or full != list(range(period, len(layer_types) + 1, period)):
        raise FormatError(
            "mlx-lm cannot build this model: its layers of full attention come at no regular step",
            found=f"layer_types {', '.join(layer_types)}",
        )
    return period


# --- names ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Names:
    """Differences between the paths of a family in both libraries.

    Args:
        beginnings: (in the Hugging Face model, in mlx-lm's model); the first that fits counts.
        inside: the same of a part of every path.
        absent: paths in the Hugging Face model that mlx-lm's model does not have.
        changed: parameters that mlx-lm stores with other values or in another layout, and how.
    """

    beginnings: tuple[tuple[str, str], ...] = ()
    absent: str | None = None
    changed: str | None = None
    inside: tuple[str, str] = ("", "")


_BESIDE = r"(model\.)?(vision_tower|multi_modal_projector|visual|mtp)\."

# Weights are 1 + w, but for the gated norm's; the convolution is (channel, width, 1).
_CHANGED = r".*(layernorm|model\.norm|[qk]_norm)\.weight$|.*\.conv1d\.weight$"
# `AutoModelForCausalLM` makes the text model of it; mlx-lm nests that for both types.
_QWEN3_5 = _Names(
    beginnings=(("model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
    absent=_BESIDE,
    changed=_CHANGED,
)

# `sanitize` splits the matrix by heads, for attention on the latents.
_LATENT = _Names(absent=r".*\.kv_b_proj(\.|$)")
# mlx-lm stacks the experts of a layer in one tensor, for every family.
_EXPERT = re.compile(r"\.experts\.")

FAMILIES: dict[str, _Names] = {
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm4_moe_lite": _LATENT,
    # mlx-lm always ties the head to the embedding.
    "gpt2": _Names(beginnings=(("transformer.", "model."),), absent=r"lm_head(\.|$)"),
    "gpt_neox": _Names(
        beginnings=(
            ("lm_head", "model.embed_out"),
            ("gpt_neox.layers.", "model.h."),
            ("gpt_neox.", "model."),
        ),
    ),
    "gptj": _Names(beginnings=(("transformer.", "model."),)),
    # `AutoModelForCausalLM` makes the multimodal model.
    "gemma3": _Names(
        beginnings=(
            ("model.language_model.", "language_model.model."),
            ("lm_head", "language_model.lm_head"),
        ),
        absent=_BESIDE,
    ),
    "granitemoe": _Names(inside=(".router.", ".router.layer.")),
    "mixtral": _Names(inside=(".mlp.", ".block_sparse_moe.")),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": _Names(absent=_BESIDE, changed=_CHANGED),
}


def mlx_path(hf_path: str, model_type: str) -> str:
    """Return the path in mlx-lm's model of the Hugging Face module or parameter `hf_path`."""
    row = _row(model_type)
    return _translated(hf_path, row.beginnings).replace(*row.inside)


def hf_path(mlx_path: str, model_type: str) -> str:
    """Return the path in the Hugging Face model of mlx-lm's module or parameter `mlx_path`."""
    row = _row(model_type)
    beginnings = tuple((mlx, hf) for hf, mlx in row.beginnings)
    hf, mlx = row.inside
    return _translated(mlx_path, beginnings).replace(mlx, hf)


STACKED = frozenset({"glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
"""Mixtures of experts of which mlx-lm changes no tensor, but stacks those of a layer's experts."""

_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def expert_names(stack: str, count: int, model_type: str) -> list[str]:
    """Return the names of Hugging Face for the experts of mlx-lm's `….switch_mlp.X.weight`."""
    block, _, matrix = stack.removesuffix(".weight").partition(".switch_mlp.")
    name = _MIXTRAL.get(matrix, matrix) if model_type == "mixtral" else matrix
    return [f"{block}.experts.{number}.{name}.weight" for number in range(count)]


def counterpart_fault(path: str, model_type: str) -> str | None:
    """Return why `path` of the Hugging Face model has no equal in mlx-lm's model; None if it
    has."""
    row = _row(model_type)
    if _EXPERT.search(path):
        return "mlx-lm keeps all experts of a layer in one switch layer"
    if row.absent and re.match(row.absent, path):
        return "mlx-lm's model has no such module"
    if row.changed and re.match(row.changed, path):
        return "mlx-lm stores this parameter with other values"
    if hf_path(mlx_path(path, model_type), model_type) != path:
        return f"no path of a {model_type} model begins like this"
    return None


def _row(model_type: str) -> _Names:
    return FAMILIES.get(model_type, _Names())


def _translated(path: str, beginnings: tuple[tuple[str, str], ...]) -> str:
    for beginning, other in beginnings:
        if path.startswith(beginning):
            return other + path.removeprefix(beginning)
    return path
