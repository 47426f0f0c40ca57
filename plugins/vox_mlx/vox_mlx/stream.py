"""A model whose weights come from the files as its layers need them, and go again.

MLX reads a tensor when it is first needed and keeps it as long as the model does. So each layer is
computed at once, and then given back weights that have not been read yet: memory holds one layer,
the embedding and the head, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn


def stream(model: nn.Module, unread: Callable[[], nn.Module]) -> None:
    """Make `model` forget each layer's weights once they were used.

    Args:
        unread: makes the same model anew, with weights that have not been read.
    """
    for index, layer in enumerate(model.layers):
        layer.__class__ = _forgetting(type(layer), lambda index=index: unread().layers[index])


def _forgetting(base: type[nn.Module], unread: Callable[[], nn.Module]) -> type[nn.Module]:
    class Layer(base):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            result = super().__call__(*args, **kwargs)
            mx.eval(result)
            _restore(self, unread())
            mx.clear_cache()
            return result

    return Layer


def _restore(layer: nn.Module, unread: nn.Module) -> None:
    """Put unread weights where the layer has read ones; an adapter's stay."""
    from mlx.utils import tree_flatten

    fresh = dict(tree_flatten(unread.parameters()))
    for path, module in layer.named_modules():
        for name in [n for n, value in module.items() if isinstance(value, mx.array)]:
            full = f"{path}.{name}".removeprefix(".").replace(".linear.", ".")
            if full in fresh:
                module[name] = fresh[full]
