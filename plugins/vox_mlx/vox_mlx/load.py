"""Generation token by token and logits, as vox's `LoadedModel` on MLX.

A streamed model reads its layers' weights from the files when needed and drops them afterwards. MLX
reads a tensor when it is first needed and keeps it as long as the model does, so each layer is
computed immediately, and then gets unread weights again: memory holds one layer, the embedding and
the head, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from vox_core.contract import LoadJob, Sampling, next_token
from vox_formats.mlx_model import window
from vox_mlx.arrays import float32
from vox_mlx.base import load_base, mlx_dtype, read_config, require_window
from vox_mlx.inject import Slots, inject
from vox_mlx.lora import settle

if TYPE_CHECKING:
    from vox_core.contract import Floats, Ints

_PREFILL = 2048
"""Tokens of a prompt that are computed at once; bounds memory."""


def load(job: LoadJob) -> MlxModel:
    """Load the model of a job."""
    config = read_config(job.model)
    model = load_base(job.model, job.dtype, job.quant, lazy=True)
    slots: Slots = {}
    if job.adapter is not None:
        injected = inject(model, config["model_type"], job.adapter)
        values = {name: float32(value) for name, value in job.adapter.tensors().items()}
        injected.fill(values, mlx_dtype(job.dtype))
        slots = injected.slots
    if job.streamed:
        stream(model, lambda: load_base(job.model, job.dtype, job.quant, lazy=True), slots)
    else:
        mx.eval(model.parameters())
        settle(model)
    return MlxModel(model.eval(), config)


class MlxModel:
    """`vox_core.contract.LoadedModel` over an mlx-lm model."""

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        self._model: nn.Module | None = model
        self._config = config

    def logits(self, tokens_T: Ints) -> Floats:
        import numpy as np

        require_window(self._config, len(tokens_T))
        logits_TV = self._loaded()(mx.array(tokens_T)[None])[0]
        copy: Floats = np.array(logits_TV.astype(mx.float32))
        return copy

    def generate(self, tokens_T: Ints, sampling: Sampling) -> Iterator[int]:
        import numpy as np
        from mlx_lm.models.cache import make_prompt_cache

        require_window(self._config, len(tokens_T))
        size = window(self._config)
        room = sampling.max_tokens if size is None else size - len(tokens_T)
        tokens, model = [int(token) for token in tokens_T], self._loaded()
        cache = make_prompt_cache(model)
        for start in range(0, len(tokens) - 1, _PREFILL):
            model(mx.array([tokens[start : len(tokens) - 1][:_PREFILL]]), cache=cache)
            mx.eval([layer.state for layer in cache])
        for _ in range(min(sampling.max_tokens, room)):
            logits_V = model(mx.array([tokens[-1:]]), cache=cache)[0, -1].astype(mx.float32)
            tokens.append(next_token(np.array(logits_V), sampling, tokens))
            yield tokens[-1]

    def close(self) -> None:
        self._model = None
        mx.clear_cache()

    def _loaded(self) -> nn.Module:
        assert self._model is not None, "the model was closed"
        return self._model


def stream(model: nn.Module, unread: Callable[[], nn.Module], kept: Slots | None = None) -> None:
    """Make `model` drop each layer's weights after use.

    Args:
        unread: builds the same model with unread weights; called once for each pass through the
            layers.
        kept: tensors of an adapter in the model, which stay.
    """
    spare = _Spare(unread, {(id(module), name) for module, name in (kept or {}).values()})
    for index, layer in enumerate(model.layers):
        layer.__class__ = _forgetting(type(layer), spare, index)


class _Spare:
    """A second, unread copy of the model, whose weights replace those already used."""

    def __init__(self, unread: Callable[[], nn.Module], kept: set[tuple[int, str]]) -> None:
        self._unread, self._kept = unread, kept
        self._layers: list[nn.Module] = []

    def restore(self, layer: nn.Module, index: int) -> None:
        """Replace `layer`'s weights by unread ones, except an adapter's."""
        if index == 0:
            self._layers = list(self._unread().layers)
        fresh = dict(tree_flatten(self._layers[index].parameters()))
        for path, module in layer.named_modules():
            for name in [n for n, value in module.items() if isinstance(value, mx.array)]:
                # An adapted layer holds the base's linear layer one level further down.
                full = f"{path}.{name}".removeprefix(".").replace(".linear.", ".")
                if full in fresh and (id(module), name) not in self._kept:
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
