"""mlx-lm's model classes, checked and corrected to compute the same as transformers.

`model_classes` replaces mlx-lm's lookup in `mlx_lm.utils.load_model`: tensors get the names and
axes that mlx-lm expects, and settings that it would ignore are refused. `correct` changes a built
model: Mistral gets its sliding window, Gemma 2 computes rows of different lengths together, gpt-oss
gets the frequencies of its own yarn, and Gemma 3's embeddings are scaled in their own dtype, where
mlx-lm always scales by a bfloat16.

tests/parity compares the families in the manifest with transformers, with each setting at
transformers' default or read by mlx-lm. A setting that mlx-lm does not read, with another value,
would make another model: `require_verified` refuses it by name.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
from mlx import nn

from vox_core.errors import ModelError

_TOWERS = ("vision_tower", "multi_modal_projector")


def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type[Any]]:
    """Return the model class and the class of its arguments, for `load_model`."""
    from mlx_lm.utils import _get_classes

    model, arguments = _get_classes(config)
    require_verified(config, arguments)
    if config["model_type"] == "gpt2":
        return _renaming(model, _gpt2_name), arguments
    if config["model_type"] == "gemma3":
        return _renaming(model, _nested_name), arguments
    if config["model_type"] == "gpt_oss":
        return _turning_experts(model), arguments
    return model, arguments


def correct(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Correct `model` so that it computes what its configuration says."""
    kind = config["model_type"]
    if kind == "mistral" and config.get("sliding_window"):
        _give_window(model.model, config["sliding_window"])
    if kind in ("gemma3", "gemma3_text"):
        text = getattr(model, "language_model", model)
        embedding = text.model.embed_tokens
        embedding.__class__ = _corrected(type(embedding), text.args.hidden_size**0.5)
    if kind == "gpt_oss" and (config.get("rope_scaling") or {}).get("truncate") is False:
        for layer in model.layers:
            _untruncate(layer.self_attn.rope, config["rope_theta"], config["rope_scaling"])
    if kind == "gemma2":
        for layer in model.layers:
            layer.self_attn.__class__ = _masked_by_row(type(layer.self_attn))


def _renaming(base: type[nn.Module], rename: Callable[[str], str | None]) -> type[nn.Module]:
    """Return a subclass of `base` that renames tensors; those renamed to None are dropped."""

    class Model(base):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            named = {rename(name): value for name, value in weights.items()}
            named.pop(None, None)
            sanitised: dict[str, mx.array] = super().sanitize(named)
            return sanitised

    return Model


def _turning_experts(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `base` that reads experts as transformers stores them: (E, I, O)."""

    class Model(base):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            ends = (".experts.gate_up_proj", ".experts.down_proj")
            for name in [name for name in weights if name.endswith(ends)]:
                weights[f"{name}.weight"] = weights.pop(name).swapaxes(1, 2)
            sanitised: dict[str, mx.array] = super().sanitize(weights)
            return sanitised

    return Model


def _gpt2_name(name: str) -> str | None:
    # The head of a tied model, stored once more; an untied one is refused (`require_verified`).
    return None if name == "lm_head.weight" else name.removeprefix("transformer.")


def _nested_name(name: str) -> str:
    """Rename a multimodal model's tensor, as transformers 5 writes it, to mlx-lm's name."""
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    if any(name.startswith(f"model.{tower}.") for tower in _TOWERS):
        return name.removeprefix("model.")
    return name


def _give_window(inner: nn.Module, size: int) -> None:
    inner.sliding_window, inner.swa_idx = size, 0
    for layer in inner.layers:
        layer.use_sliding = True


def _untruncate(rope: nn.Module, theta: float, scaling: Mapping[str, Any]) -> None:
    """Blend the frequencies of yarn (arXiv:2309.00071) between its exact bounds, which mlx-lm
    rounds to whole numbers."""
    dims, original = rope.dims, scaling["original_max_position_embeddings"]

    def place(key: str, usual: float) -> float:
        turns = scaling.get(key) or usual
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(place("beta_fast", 32), 0), min(place("beta_slow", 1), dims - 1)
    scaled_F = mx.clip((mx.arange(dims // 2) - low) / (high - low or 1e-3), 0, 1)
    period_F = theta ** (mx.arange(0, dims, 2) / dims)
    rope._freqs = period_F / (1 - scaled_F + scaled_F / scaling["factor"])


def _corrected(base: type[nn.Module], scale: float) -> type[nn.Module]:
    """Return an embedding that compensates for `scale` being rounded to bfloat16 after it."""

    class Embedding(base):  # type: ignore[misc, valid-type]
        def __call__(self, tokens: mx.array) -> mx.array:
            x = super().__call__(tokens)
            return x * (mx.array(scale, x.dtype) / mx.array(scale, mx.bfloat16).astype(x.dtype))

    return Embedding


def _masked_by_row(base: type[nn.Module]) -> type[nn.Module]:
    """Return an attention whose masks of rows have an axis for the queries that share a key."""

    class Attention(base):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> Any:
            by_row = mask is not None and mask.ndim == 4 and self.repeats > 1
            return super().__call__(x, mask[:, :, None] if by_row else mask, cache)

    return Attention


# Settings that do not affect the computation, or that are handled elsewhere: token ids, dropout (a
# base's own is off), initialisation, names; rope and windows (vox_formats.mlx_model).
_NEUTRAL = {
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "bos_token_id",
    "classifier_dropout",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "label2id",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "original_max_position_embeddings",
    "pad_token_id",
    "pretraining_tp",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
}
# mlx-lm derives these from other settings or the weights, or vox passes them under another name.
_SEEN_OTHERWISE = {
    "deepseek_v3": {"head_dim", "qk_head_dim"},
    "gemma3_text": {"layer_types", "tie_word_embeddings"},
    "mistral": {"layer_types"},
    "qwen3_5_text": {"layer_types"},
    "qwen3_moe": {"num_local_experts"},
}
# mlx-lm accepts these and ignores them.
_TAKEN_IN_VAIN = {"nemotron": {"hidden_act"}}


def require_verified(config: Mapping[str, Any], arguments: type[Any]) -> None:
    """Refuse settings that mlx-lm does not read and that differ from transformers' default.

    Args:
        config: `config.json` as passed to mlx-lm, or its language model's part.
        arguments: mlx-lm's class of the model's arguments.

    Raises:
        ModelError: M002, naming each.
    """
    text = config.get("text_config") or config
    if faults := list(_unread(text, _read_by(arguments))):
        raise ModelError(
            "M002",
            "mlx-lm leaves out settings of this model, and would compute another one",
            where="config.json",
            faults=faults,
            remedy="use a torch backend for this model: --backend cpu, or cuda",
        )


def _unread(text: Mapping[str, Any], read: set[str]) -> Iterator[str]:
    from transformers import CONFIG_MAPPING

    kind = "qwen3_5_text" if text["model_type"] == "qwen3_5" else text["model_type"]
    if kind not in CONFIG_MAPPING:
        return
    layers = {key: text[key] for key in ("num_hidden_layers", "n_layer") if key in text}
    usual = CONFIG_MAPPING[kind](**layers).to_dict()
    if text.get("head_dim") and usual.get("head_dim", 0) is None:
        usual["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    neutral = _NEUTRAL | _SEEN_OTHERWISE.get(kind, set())
    known = (read | neutral) - _TAKEN_IN_VAIN.get(kind, set())
    for key, value in text.items():
        if key in usual and key not in known and value != usual[key]:
            yield f"{key} = {value!r}; only {usual[key]!r} is known to be right"


def _read_by(arguments: type[Any]) -> set[str]:
    """Return the settings that a model of mlx-lm reads, including its inner language model's."""
    module = sys.modules[arguments.__module__]
    parts = [arguments, getattr(module, "TextModelArgs", None)]
    inner = getattr(module, "gemma3_text", None)
    parts.append(getattr(inner, "ModelArgs", None))
    return {field.name for part in parts if part for field in dataclasses.fields(part)}
