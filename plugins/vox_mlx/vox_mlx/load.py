"""Models that answer: generation token by token, and logits, through vox's `LoadedModel`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from vox_core.adapter.mlx_config import require_window, window
from vox_core.contract import LoadJob, Sampling
from vox_mlx.arrays import float32
from vox_mlx.base import load_base, mlx_dtype, read_config
from vox_mlx.inject import Slots, inject
from vox_mlx.stream import stream

if TYPE_CHECKING:
    from vox_core.contract import Floats, Ints


def load(job: LoadJob) -> MlxModel:
    """Load what the job names."""
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
        from mlx_lm.generate import generate_step

        require_window(self._config, len(tokens_T))
        size = window(self._config)
        room = sampling.max_tokens if size is None else size - len(tokens_T)
        mx.random.seed(sampling.seed)
        steps = generate_step(
            mx.array(tokens_T),
            self._loaded(),
            max_tokens=min(sampling.max_tokens, room),
            sampler=partial(sample, sampling=sampling),
        )
        for token, _ in steps:
            if token in sampling.stop_tokens:
                return
            yield int(token)

    def close(self) -> None:
        self._model = None
        mx.clear_cache()

    def _loaded(self) -> nn.Module:
        assert self._model is not None, "the model was closed"
        return self._model


def sample(logits_1V: mx.array, sampling: Sampling) -> mx.array:
    """The next token: greedy at temperature 0, else nucleus sampling (arXiv:1904.09751).

    The temperature comes first, as in transformers; mlx-lm's own sampler takes the nucleus of the
    distribution before it.
    """
    from mlx_lm.sample_utils import apply_top_p

    if sampling.temperature == 0:
        return mx.argmax(logits_1V, axis=-1)
    logits_1V = logits_1V / sampling.temperature
    logits_1V = logits_1V - mx.logsumexp(logits_1V, axis=-1, keepdims=True)
    if sampling.top_p < 1:
        logits_1V = apply_top_p(logits_1V, sampling.top_p)
    return mx.random.categorical(logits_1V)
