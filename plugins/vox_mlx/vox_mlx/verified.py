"""Check that mlx-lm computes the model that a `config.json` describes.

tests/parity compares the families in the manifest with transformers, with each setting at
transformers' default or read by mlx-lm. A setting that mlx-lm does not read, with another value,
would make another model: it is refused by name.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from vox_core.errors import ModelError

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
# mlx-lm derives these from the weights, or vox passes them under another name.
_SEEN_OTHERWISE = {
    "gemma3_text": {"layer_types", "tie_word_embeddings"},
    "mistral": {"layer_types"},
    "qwen3_5_text": {"layer_types"},
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
