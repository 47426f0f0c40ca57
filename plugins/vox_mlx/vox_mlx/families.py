"""What has to be told to mlx-lm about a family, so that it computes what transformers computes.

mlx-lm reads `config.json` in the words of the time when a family was added: it takes a default
where transformers 5 writes the same thing under another name (`rope_parameters`), and a few of its
models leave out a sliding window. Both would be another model, silently. `mlx_config` translates;
`window` says how far a model may see that mlx-lm would let see everything.

Nothing here imports MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vox_core.errors import ModelError

# Rotary embeddings that mlx-lm computes as transformers does (tests/parity/test_rope.py).
_ROPES = ("default", "linear", "llama3", "mrope", "yarn")

# Families whose sliding window mlx-lm has; for Mistral, `windowed.py` puts it in.
_WITH_WINDOW = (
    "cohere2",
    "gemma3",
    "gemma3_text",
    "gpt_oss",
    "mistral",
    "ministral3",
    "olmo3",
)


def mlx_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` as mlx-lm reads it.

    Raises:
        ModelError: M002, a setting of which mlx-lm would make something else.
    """
    adapted = {**config, **_text(config)}
    if isinstance(nested := config.get("text_config"), dict):
        adapted["text_config"] = {**nested, **_text(nested)}
    if config.get("model_type") == "qwen3_5_text":
        adapted["model_type"] = "qwen3_5"
    return adapted


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


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a language model's configuration that mlx-lm calls otherwise."""
    changed = _rope(config)
    if config.get("model_type") == "gpt2":
        changed["n_ctx"] = config.get("n_ctx", config.get("n_positions"))
    if config.get("model_type") == "gemma3_text" and config.get("layer_types"):
        changed["sliding_window_pattern"] = _period(config["layer_types"])
    return changed


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    written = config.get("rope_parameters")
    if not isinstance(written, dict):
        _require_known(config.get("rope_scaling"))
        return {}
    if "full_attention" in written:
        whole, local = written["full_attention"], written.get("sliding_attention", {})
        changed = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
        return {**changed, **_rope({"rope_parameters": whole})}
    changed = {"rope_theta": written["rope_theta"]} if "rope_theta" in written else {}
    if "partial_rotary_factor" in written:
        changed["partial_rotary_factor"] = written["partial_rotary_factor"]
    if _require_known(written) != "default":
        scaling = {key: value for key, value in written.items() if key != "rope_theta"}
        changed["rope_scaling"] = {**scaling, "type": scaling.get("rope_type", "default")}
    return changed


def _require_known(scaling: Any) -> str:
    said = scaling if isinstance(scaling, dict) else {}
    kind = str(said.get("rope_type") or said.get("type") or "default")
    if kind in _ROPES:
        return kind
    raise ModelError(
        "M002",
        "the model's rotary embedding is not one that mlx-lm computes as transformers does",
        where="config.json",
        found=kind,
        expected=f"one of {', '.join(_ROPES)}",
        remedy="use a torch backend for this model: --backend cpu, or cuda",
    )


def _period(layer_types: list[str]) -> int:
    """Every how many layers one attends to everything, as mlx-lm wants it."""
    full = [i for i, kind in enumerate(layer_types, 1) if kind == "full_attention"]
    period = full[0] if full else 0
    regular = period and full == list(range(period, len(layer_types) + 1, period))
    if not regular:
        raise ModelError(
            "M002",
            "mlx-lm cannot build this model: its layers of full attention come at no regular step",
            where="config.json, layer_types",
            found=", ".join(layer_types),
            remedy="use a torch backend for this model: --backend cpu, or cuda",
        )
    return period


def require_window(config: Mapping[str, Any], length: int) -> None:
    """Refuse documents that are longer than a window which mlx-lm leaves out.

    Raises:
        ModelError: M002.
    """
    size = window(config)
    if size is not None and length > size:
        raise ModelError(
            "M002",
            "mlx-lm leaves out this model's sliding window, and would compute another model",
            found=f"documents of up to {length} tokens, a window of {size}",
            remedy=f"shorten documents to the window, with --seq-len {size}, or use a torch "
            "backend: --backend cpu, or cuda",
        )
