"""Generation token by token and logits, as vox's `LoadedModel` on MLX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from vox_core.contract import LoadJob, Sampling, next_token
from vox_formats.mlx_model import window
from vox_mlx.arrays import float32
from vox_mlx.base import load_base, mlx_dtype, read_config, require_window
from vox_mlx.inject import Slots, inject
from vox_mlx.lora import settle
from vox_mlx.stream import stream

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
