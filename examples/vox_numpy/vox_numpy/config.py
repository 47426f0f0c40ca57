"""A Llama's folder: its settings and its weights.

What a folder asks for and `llama.py` does not compute is refused: other activations, other scalings
of the rotary positions, tensors of another model.

Shape legend: D size of a head.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vox_core.adapter.targets import linear_modules, require_fit
from vox_core.contract import AdapterState
from vox_core.errors import ModelError
from vox_core.weights import WeightFolder
from vox_numpy.functions import Array, DType

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_LLAMA3 = ["factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"]


@dataclass(frozen=True)
class Config:
    """The keys of `config.json` that a Llama's logits depend on, with transformers' defaults."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Config:
        """Raises KeyError, TypeError or ValueError."""
        needed = {"model_type": "llama", "hidden_act": "silu", "partial_rotary_factor": 1}
        for key, value in needed.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} is {config[key]}, expected {value}")
        heads = config["num_attention_heads"]
        derived = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads}
        given = {**derived, **{key: value for key, value in config.items() if value is not None}}
        return cls(**{each.name: given[each.name] for each in fields(cls) if each.name in given})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by its name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        attention = {"self_attn.q": (queries, hidden), "self_attn.o": (hidden, queries)}
        attention |= dict.fromkeys(["self_attn.k", "self_attn.v"], (keys, hidden))
        mlp = {"mlp.gate": (inner, hidden), "mlp.up": (inner, hidden), "mlp.down": (hidden, inner)}
        ends = [EMBEDDING] if self.tie_word_embeddings else [EMBEDDING, HEAD]
        shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
        shapes |= {f"{end}.weight": (self.vocab_size, hidden) for end in ends}
        for layer in (f"model.layers.{number}" for number in range(self.num_hidden_layers)):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{layer}.{norm}.weight"] = (hidden,)
            for name, shape in {**attention, **mlp}.items():
                shapes[f"{layer}.{name}_proj.weight"] = shape
                if self.mlp_bias if name in mlp else self.attention_bias:
                    shapes[f"{layer}.{name}_proj.bias"] = shape[:1]
        return shapes


def rotary_frequencies(config: Mapping[str, Any]) -> Array:
    """Return the angle per position of each pair of features, float64 (D / 2,).

    The settings have two spellings: `rope_theta` and `rope_scaling`, or both in `rope_parameters`.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = {"rope_theta": config.get("rope_theta", 10_000.0), **given}
    theta, old_key = rope.pop("rope_theta"), rope.pop("type", "default")
    scaling = rope.pop("rope_type", old_key)
    head = Config.of(config).head_dim
    frequencies: Array = theta ** (-np.arange(0, head, 2) / head)
    if scaling == "default" and not rope:
        return frequencies
    if scaling == "linear" and [*rope] == ["factor"]:
        return np.asarray(frequencies / rope["factor"])
    if scaling != "llama3" or sorted(rope) != _LLAMA3:
        raise ValueError(f"rotary positions {given}, expected default, linear or llama3")
    # Llama 3.1: long waves are stretched, short ones stay, and between the two it is gradual.
    factor, high, low, original = (rope[key] for key in _LLAMA3)
    original = config.get("original_max_position_embeddings", original)
    kept = np.clip((original * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
    return np.asarray((1 - kept) * frequencies / factor + kept * frequencies)


class Llama:
    """The settings and weights of a folder.

    Args:
        dtype: of the computation: float32, or for tests float64.
        streamed: read each tensor whenever it is used, instead of once.

    Raises:
        ModelError: M002, it is no Llama, or one that is not supported; M003 and M005, its files.
    """

    def __init__(self, folder: Path, dtype: DType = np.float32, *, streamed: bool = False) -> None:
        self.folder, self.dtype, self._files = folder, dtype, WeightFolder(folder)
        try:
            config = json.loads((folder / "config.json").read_bytes())
            self.config, self.frequencies = Config.of(config), rotary_frequencies(config)
            self.shapes = self.config.shapes()
            self._require_shapes()
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            what, found = "the numpy backend does not support this model", repr(error)
            remedy = "check that the folder is complete, or use --backend cpu"
            raise ModelError("M002", what, where=folder, found=found, remedy=remedy) from error
        self.weight = self._read if streamed else cache(self._read)

    def require_fit(self, adapter: AdapterState) -> None:
        """Raises AdapterError: A002, the adapter does not belong to the model."""
        modules = linear_modules(self._files.tensors, "llama")
        require_fit(adapter, modules, self.shapes, self.folder)

    def _read(self, name: str) -> Array:
        return self._files.read(name).astype(self.dtype, copy=False)

    def _require_shapes(self) -> None:
        found = {name: info.shape for name, info in self._files.tensors.items()}
        # Old files have the rotary frequencies, too, and some the tied head once more.
        ignored = r"lm_head\.weight$|.*\.rotary_emb\.inv_freq$"
        extra = {name for name in found.keys() - self.shapes if not re.match(ignored, name)}
        wrong = {name for name, shape in self.shapes.items() if found.get(name) != shape}
        faults = [f"{n}: {found.get(n)}, not {self.shapes.get(n)}" for n in sorted(extra | wrong)]
        if faults:
            raise ValueError(f"shapes of tensors: {'; '.join(faults)}")
