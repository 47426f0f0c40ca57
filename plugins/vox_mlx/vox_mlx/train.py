"""Adapters and models that learn, as vox's `Trainer` on MLX.

Gradients are those of `sum(weight * nll)`, summed in float32 over the parts of a step.

MLX builds a graph and evaluates it on demand: here once for each part of a batch, for its
log-probabilities and the sum of the gradients together, and once for each update, for values and
moments. A longer graph would hold every part's activations at once; a shorter one would wait for
the device more often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from vox_core.contract import (
    Batch,
    Doubles,
    Floats,
    RunContext,
    Trainer,
    TrainJob,
    TrainState,
    Update,
    Weigh,
)
from vox_mlx.base import load_base, mlx_dtype, read_config, require_window
from vox_mlx.blas import keep_memory
from vox_mlx.inject import Values, recompute_layers
from vox_mlx.loss import Rows
from vox_mlx.model import MlxModel, on_gpu
from vox_mlx.optimizer import AdamW, global_norm
from vox_mlx.ring import Ring


@dataclass(slots=True, eq=False)
class _Learner:
    """An adapter that learns.

    Attributes:
        differentiate: (values, rows, key) -> ((loss, (K,) nll), gradients).
        gradients: accumulated since the last update; empty if there are none.
        kept: those of a rank above 0, not yet added.
        stale: the model's copy of the values is an older one.
    """

    optimizer: AdamW
    differentiate: Callable[..., Any]
    gradients: Values = field(default_factory=dict)
    kept: list[Values] = field(default_factory=list)
    stale: bool = False


class MlxTrainer(MlxModel, Trainer):
    """A base and its learners."""

    def __init__(self, job: TrainJob, context: RunContext) -> None:
        contract, plan = job.plan.contract, job.plan
        config = read_config(job.model)
        require_window(config, plan.longest or contract.seq_len)
        if not on_gpu():
            keep_memory()
        # Weights are read only after the first learner is known to fit.
        model = load_base(job.model, plan.dtype, contract.quant, lazy=True)
        super().__init__(model, config, mlx_dtype(plan.dtype), contract.adapter.dropout)
        if plan.gradient_checkpointing:
            recompute_layers(model, self._adapters)
        self._job, self._context = job, context
        self._learners: dict[str, _Learner] = {}
        self._ring = Ring(context.world) if context.world.size > 1 else None

    def add_learner(self, name: str, state: TrainState) -> None:
        spec, optimizer = self._job.plan.contract.adapter, AdamW(state)
        self.add_adapter(name, state.adapter, optimizer.values)
        if spec.method == "full" and not spec.targets:
            self._adapters.require_every_weight(name)
        mx.eval(self._model.parameters())
        self._learners[name] = _Learner(optimizer, self._differentiate(name))

    def remove_learner(self, name: str) -> None:
        del self._learners[name]
        self.remove_adapter(name)

    def accumulate(
        self, batch: Batch, seed: int, learner: str, weigh: Weigh | None = None
    ) -> Floats:
        assert weigh is None, "one-pass is not declared"
        own = self._learners[learner]
        if not self._model.training:
            self._model.train()  # families with an inference-only kernel check this flag
        log_probs_T = np.zeros(batch.targets_T.shape, np.float32)
        for part, positions_K, key in self._parts(batch, list(batch.documents()), seed):
            (_, nll_K), more = own.differentiate(own.optimizer.values, part, key)
            own.stale = True
            if self._context.world.leads:
                own.gradients = more = _added(own.gradients, more)
            else:
                own.kept.append(more)
            mx.eval(nll_K, more)
            log_probs_T[positions_K] = -np.array(nll_K)[: len(positions_K)]
        return log_probs_T

    def update(self, update: Update, learner: str) -> float:
        own = self._learners[learner]
        if self._ring:
            sums = self._ring.gather_sum(own.gradients, own.kept, own.optimizer.values)
        else:
            sums = own.gradients or {n: mx.zeros_like(v) for n, v in own.optimizer.values.items()}
        self.discard(learner)
        gradients = {name: sums.pop(name) / update.total_weight for name in [*sums]}
        norm = global_norm(gradients)
        if math.isfinite(norm):
            own.optimizer.update(gradients, norm, update)
            own.stale = True
        return norm

    def discard(self, learner: str) -> None:
        self._learners[learner].gradients = {}
        self._learners[learner].kept.clear()

    def share(self, values_N: Doubles) -> Doubles:
        return self._ring.share(values_N) if self._ring else values_N

    def state(self, learner: str) -> TrainState:
        return self._learners[learner].optimizer.state()

    def close(self) -> None:
        self._learners.clear()
        super().close()

    def peak_memory(self) -> int | None:
        return mx.get_peak_memory() if on_gpu() else None

    def _differentiate(self, name: str) -> Callable[..., Any]:
        def loss(values: Values, part: Rows, key: mx.array | None) -> tuple[mx.array, mx.array]:
            self._adapters.fill(name, values)
            nll_K = self._nll(name, part, key)
            return (nll_K * part.weights_K).sum(), nll_K

        return _compiled(mx.value_and_grad(loss))

    def _ready(self, names: Sequence[str | None]) -> None:
        super()._ready(names)
        for name in self._learners.keys() & {*names}:
            if self._learners[name].stale:
                self._adapters.fill(name, self._learners[name].optimizer.values)
                self._learners[name].stale = False


def _added(sums: Values, more: Values) -> Values:
    """Add gradients. Both are emptied: MLX reuses the memory of arrays that nothing else holds."""
    return {n: more.pop(n) + sums.pop(n) if n in sums else more.pop(n) for n in [*more]}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # On the CPU, MLX compiles through the system's C++ compiler: 48 s for a tiny model, after which
    # a step took as long as before. GPU kernels compile in milliseconds.
    return mx.compile(function) if on_gpu() else function
