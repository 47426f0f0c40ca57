"""mlx-lm's model classes, with what some families need to be what transformers computes.

`model_classes` goes into `mlx_lm.utils.load_model` where mlx-lm's own lookup would. GPT-2's tensors
lose the prefix that mlx-lm does not expect; Mistral gets the sliding window that mlx-lm leaves out;
Gemma 3's embeddings, which mlx-lm scales by a bfloat16 whatever the dtype, are scaled as precisely
as their dtype allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn


def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type[Any]]:
    """The model class and the class of its arguments, for `load_model`."""
    from mlx_lm.utils import _get_classes

    model, arguments = _get_classes(config)
    if config["model_type"] == "gpt2":
        return _without_prefix(model, "transformer."), arguments
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        return _windowed(model, config["sliding_window"]), arguments
    if config["model_type"] in ("gemma3", "gemma3_text"):
        return _scaled_precisely(model), arguments
    return model, arguments


def _without_prefix(base: type[nn.Module], prefix: str) -> type[nn.Module]:
    class Model(base):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            plain = {name.removeprefix(prefix): value for name, value in weights.items()}
            plain.pop("lm_head.weight", None)
            sanitised: dict[str, mx.array] = super().sanitize(plain)
            return sanitised

    return Model


def _windowed(base: type[nn.Module], size: int) -> type[nn.Module]:
    class Model(base):  # type: ignore[misc, valid-type]
        def __init__(self, arguments: Any) -> None:
            super().__init__(arguments)
            self.model.sliding_window, self.model.swa_idx = size, 0
            for layer in self.model.layers:
                layer.use_sliding = True

    return Model


def _scaled_precisely(base: type[nn.Module]) -> type[nn.Module]:
    class Model(base):  # type: ignore[misc, valid-type]
        def __init__(self, arguments: Any) -> None:
            super().__init__(arguments)
            text = getattr(self, "language_model", self)
            embedding = text.model.embed_tokens
            embedding.__class__ = _corrected(type(embedding), text.args.hidden_size**0.5)

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            renamed = {_nested(name): value for name, value in weights.items()}
            sanitised: dict[str, mx.array] = super().sanitize(renamed)
            return sanitised

    return Model


def _nested(name: str) -> str:
    """A multimodal model's tensor as mlx-lm expects it; transformers 5 writes them otherwise."""
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    for tower in ("vision_tower", "multi_modal_projector"):
        if name.startswith(f"model.{tower}."):
            return name.removeprefix("model.")
    return name


def _corrected(base: type[nn.Module], scale: float) -> type[nn.Module]:
    """An embedding that makes up for `scale` being rounded to bfloat16 behind it."""
    import mlx.core as mx

    class Embedding(base):  # type: ignore[misc, valid-type]
        def __call__(self, tokens: mx.array) -> mx.array:
            x = super().__call__(tokens)
            return x * (mx.array(scale, x.dtype) / mx.array(scale, mx.bfloat16).astype(x.dtype))

    return Embedding
