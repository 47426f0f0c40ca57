"""Load a model for generation, scores and logits, in memory or streamed.

A streamed model reads its layers' weights from the files when needed and drops them afterwards. MLX
reads a tensor when it is first needed and keeps it as long as the model does, so each layer is
computed immediately, and then gets unread weights again: memory holds one layer, the embedding and
the head, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from vox_mlx.base import load_base, mlx_dtype, read_config
from vox_mlx.model import MlxModel

if TYPE_CHECKING:
    from vox_core.contract import LoadJob


def load(job: LoadJob) -> MlxModel:
    """Load the model of a job."""
    config, dtype = read_config(job.model), mlx_dtype(job.dtype)
    model = load_base(job.model, job.dtype, job.quant, lazy=job.streamed)
    loaded = MlxModel(model, config, dtype, settles=not job.streamed)
    if job.streamed:
        stream(model, lambda: load_base(job.model, job.dtype, job.quant, lazy=True))
    return loaded


def stream(model: nn.Module, unread: Callable[[], nn.Module]) -> None:
    """Make `model` drop each layer's weights after use.

    Args:
        unread: builds the same model with unread weights; called once for each pass through the
            layers.
    """
    spare = _Spare(unread)
    for index, layer in enumerate(model.layers):
        layer.__class__ = _forgetting(type(layer), spare, index)


class _Spare:
    """A second, unread copy of the model, whose weights replace those already used."""

    def __init__(self, unread: Callable[[], nn.Module]) -> None:
        self._unread = unread
        self._layers: list[nn.Module] = []

    def restore(self, layer: nn.Module, index: int) -> None:
        """Replace `layer`'s weights by unread ones; an adapter's stay."""
        if index == 0:
            self._layers = list(self._unread().layers)
        fresh = dict(tree_flatten(self._layers[index].parameters()))
        for path, module in layer.named_modules():
            for name in [n for n, value in module.items() if isinstance(value, mx.array)]:
                # An adapted layer holds the base's linear layer one level further down.
                full = f"{path}.{name}".removeprefix(".").replace(".linear.", ".")
                if full in fresh:
                    module[name] = fresh[full]


def _forgetting(base: type[nn.Module], spare: _Spare, index: int) -> type[nn.Module]:
    class Layer(base):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            result = super().__call__(*args, **kwargs)
            mx.eval(result)
            spare.restore(self, index)
            mx.clear_cache()
            return result

    return Layer
