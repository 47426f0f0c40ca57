"""`config.json` as mlx-lm reads it, and what mlx-lm would make of it otherwise.

mlx-lm reads a configuration in the words of the time when a family was added: it takes a default
where transformers 5 writes the same thing under another name (`rope_parameters`), knows scaled
rotary embeddings in some families only, and leaves the sliding window out of a few. Each would be
another model, silently. `mlx_config` translates or refuses; `window` says how far a model may see
that mlx-lm would let see everything. tests/parity/test_mlx_config.py holds both against
transformers.

Whether mlx-lm knows a family at all, and reads its other settings, is the MLX backend's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vox_core.errors import ModelError

# Families where mlx-lm scales the rotary embedding as transformers does, and the kinds. Keys beyond
# these change what transformers computes and are not read.
_SCALED = (
    "gemma3_text",
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
_WITH_WINDOW = ("cohere2", "gemma3_text", "mistral", "olmo3")

_ELSEWHERE = "use a torch backend for this model: --backend cpu, or cuda"


def mlx_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with what mlx-lm calls otherwise added under mlx-lm's names.

    Raises:
        ModelError: M002, a setting of which mlx-lm would make something else.
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
    """What mlx-lm by itself, without vox, would take to be something else: setting by setting.

    Raises:
        ModelError: M002, as `mlx_config`.
    """
    text = config.get("text_config") or config
    told = _text(text)
    found = [f"{key} = {value!r}" for key, value in told.items() if text.get(key, _ABSENT) != value]
    if text.get("model_type") == "mistral" and text.get("sliding_window"):
        found.append(f"sliding_window = {text['sliding_window']}")
    return found


_ABSENT = object()


def window(config: Mapping[str, Any]) -> int | None:
    """Tokens that a layer may look back, where mlx-lm would let it look back further."""
    text = config.get("text_config") or config
    kind, size = text.get("model_type"), text.get("sliding_window")
    if (
        kind in _WITH_WINDOW
        or not isinstance(size, int)
        or not text.get("use_sliding_window", True)
    ):
        return None
    return size


def require_window(config: Mapping[str, Any], length: int) -> None:
    """Refuse a document that is longer than a window which mlx-lm leaves out.

    Raises:
        ModelError: M002.
    """
    size = window(config)
    if size is not None and length > size:
        raise ModelError(
            "M002",
            "mlx-lm leaves out this model's sliding window, and would compute another model",
            found=f"a document of {length} tokens, a window of {size}",
            remedy=f"shorten documents to the window, with --seq-len {size}, or {_ELSEWHERE}",
        )


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a language model's configuration that mlx-lm calls otherwise."""
    kind = str(config.get("model_type"))
    changed = _rope(kind, config)
    if kind == "gpt2":
        changed["n_ctx"] = config.get("n_ctx", config.get("n_positions"))
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
    """The kind of rotary embedding, if mlx-lm computes it as transformers does."""
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    known = _KINDS.get(kind, frozenset()) if family in _SCALED else frozenset()
    if kind in _UNSCALED:
        known = frozenset(_MROPE)
    set_keys = {key for key, value in scaling.items() if value is not None}
    if (kind in _UNSCALED or known) and not (strange := set_keys - known - _ALWAYS):
        return kind
    details = f" with {', '.join(sorted(strange))}" if known else ""
    raise _unlike(f"{kind} in {family}{details}")


def _unlike(found: str) -> ModelError:
    return ModelError(
        "M002",
        "the model's rotary embedding is not one that mlx-lm computes as transformers does",
        where="config.json",
        found=found,
        expected=f"no scaling; or one of {', '.join(_KINDS)} in {', '.join(_SCALED)}",
        remedy=_ELSEWHERE,
    )


def _period(layer_types: list[str]) -> int:
    """Every how many layers one attends to everything, as mlx-lm wants it."""
    full = [i for i, kind in enumerate(layer_types, 1) if kind == "full_attention"]
    period = full[0] if full else 0
    if not period or full != list(range(period, len(layer_types) + 1, period)):
        raise ModelError(
            "M002",
            "mlx-lm cannot build this model: its layers of full attention come at no regular step",
            where="config.json, layer_types",
            found=", ".join(layer_types),
            remedy=_ELSEWHERE,
        )
    return period
