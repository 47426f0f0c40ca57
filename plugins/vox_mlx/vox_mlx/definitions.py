"""mlx-lm's model classes, corrected to compute the same as transformers.

`model_classes` replaces mlx-lm's lookup in `mlx_lm.utils.load_model`: tensors get the names that
mlx-lm expects, and settings that it would ignore are refused. `correct` changes a built model:
Mistral gets its sliding window, and Gemma 3's embeddings are scaled in their own dtype, where
mlx-lm always scales by a bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx import nn

from vox_mlx.verified import require_verified

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


def _renaming(base: type[nn.Module], rename: Callable[[str], str | None]) -> type[nn.Module]:
    """Return a subclass of `base` that renames tensors; those renamed to None are dropped."""

    class Model(base):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            named = {rename(name): value for name, value in weights.items()}
            named.pop(None, None)
            sanitised: dict[str, mx.array] = super().sanitize(named)
            return sanitised

    return Model


def _gpt2_name(name: str) -> str | None:
    # The head of a tied model, stored once more; an untied one is refused (verified.py).
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


def _corrected(base: type[nn.Module], scale: float) -> type[nn.Module]:
    """Return an embedding that compensates for `scale` being rounded to bfloat16 after it."""

    class Embedding(base):  # type: ignore[misc, valid-type]
        def __call__(self, tokens: mx.array) -> mx.array:
            x = super().__call__(tokens)
            return x * (mx.array(scale, x.dtype) / mx.array(scale, mx.bfloat16).astype(x.dtype))

    return Embedding
