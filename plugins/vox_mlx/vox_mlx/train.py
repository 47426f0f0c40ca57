"""The training loop on MLX.

loss of a step = sum(weight * nll) / total_weight, over the step; each micro-batch contributes its
share, so the result does not depend on the micro-batches. Randomness (dropout) is keyed per (run
seed, step, micro-batch).

MLX builds a graph and evaluates it on demand: here once per micro-batch, for the loss and the sum
of the gradients together, and once per step, for values and moments. A longer graph would hold
every micro-batch's activations at once; a shorter one would wait for the device more often.

On a CPU more than some hundred tokens bring no speed, while padding and cache misses cost some: on
CPUs, micro-batches are split into smaller ones, mostly of a single document. Dropout is keyed by
these.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from vox_core.contract import (
    Batch,
    Notice,
    RunContext,
    Step,
    StepDone,
    TrainJob,
    TrainResult,
    TrainState,
    cut_to_rows,
    probe_document,
)
from vox_core.contract.loop import NotFinite, before_update, follow, micro_batch_seed
from vox_mlx.attention import BLOCK, attend_in_blocks
from vox_mlx.base import load_base, mlx_dtype, read_config, require_window
from vox_mlx.blas import keep_memory
from vox_mlx.inject import inject, recompute_layers
from vox_mlx.loss import LENGTHS, Rows, choose_at_head, nll, rows, weighted_nll
from vox_mlx.optimizer import AdamW, Values, global_norm

if TYPE_CHECKING:
    from vox_core.contract import Floats

_NATS = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
"""How far log-probabilities may move when attention goes by blocks, as a root mean square: far more
than roundoff in float32, and in half precision what real models lie away from float32."""

_NOT_FAST = (
    "attention in blocks gives log-probabilities {apart:.2g} nats away from mlx-lm's own for this "
    "model: this run uses mlx-lm's, which is slower and right; please report it with the name of "
    "the model"
)

_ON_CPU = 256
"""Positions of padded rows at once. The cost of a call is that of some 30 tokens of SmolLM2."""


class Trainer:
    """One run: the model with its adapter, the optimizer, and the steps."""

    def __init__(self, job: TrainJob, context: RunContext) -> None:
        contract, plan = job.plan.contract, job.plan
        steps = iter(job.steps)
        first = next(steps, None)
        job = replace(job, steps=itertools.chain([first] if first else [], steps))
        require_window(read_config(job.model), plan.longest or contract.seq_len)
        if not _on_gpu():
            keep_memory()
        # Weights are read only after the adapter is known to fit.
        model = load_base(job.model, plan.dtype, contract.quant, lazy=True)
        model.train()  # families with an inference-only kernel check this flag
        self._injected = inject(
            model, contract.model.model_type, job.start.adapter, contract.adapter.dropout
        )
        mx.eval(model.parameters())
        self._chosen = choose_at_head(model)
        if plan.gradient_checkpointing:
            recompute_layers(self._injected)
        self._dtype = mlx_dtype(plan.dtype)
        self._optimizer = AdamW(job.start, contract.optimizer)
        self._value_and_grad = _compiled(mx.value_and_grad(self._share))
        self._job, self._context = job, context
        if not _on_gpu():
            self._attend_in_blocks(first if plan.longest > BLOCK else None)

    def _attend_in_blocks(self, first: Step | None) -> None:
        """Use attention in blocks, unless it changes the log-probabilities of a document of
        `first`."""
        model = self._injected.model
        if first is None:  # no document is longer than a block, or there is nothing left to train
            attend_in_blocks(model)
            return
        probe = _two_blocks(probe_document(first.batches))
        before_K = self._log_probs(probe)
        classes = [(module, type(module)) for module in model.modules()]
        attend_in_blocks(model)
        apart = float(np.sqrt(np.square(self._log_probs(probe) - before_K).mean()))
        if apart <= _NATS[self._job.plan.dtype] or not np.isfinite(before_K).all():
            return
        for module, own in classes:
            module.__class__ = own
        self._context.emit(Notice(_NOT_FAST.format(apart=apart), "warning"))

    def _log_probs(self, batch: Batch) -> Floats:
        """Return (K,) log p(target) at the trained positions."""
        found = rows(batch)
        self._injected.fill(self._optimizer.values, self._dtype)
        self._injected.dropout.begin(None, len(self._job.start.adapter.modules))
        self._chosen.index_K = found.index_K
        logits_KV = self._injected.model(found.tokens_NL)
        log_probs_K = -nll(logits_KV, found.targets_K)
        return np.array(log_probs_K[: int((batch.weights_T > 0).sum())])

    def run(self) -> TrainResult:
        """Take every step of the job, or stop on request."""
        return follow(self._job, self._context, self)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the weighted mean loss over `batches`."""
        total, weight = 0.0, 0.0
        for batch in _cut(batches):
            total += self._share(self._optimizer.values, self._rows(batch), None).item()
            weight += float(batch.weights_T.sum())
        return total / weight

    def state(self, step: int) -> TrainState:
        """Values and moments after `step`."""
        return self._optimizer.state(step, self._job.start.adapter)

    def step(self, step: Step) -> StepDone:
        """Take one optimizer step.

        Raises:
            NotFinite: T001; nothing was changed.
        """
        started = time.perf_counter()
        with before_update():
            loss, gradients, norm = self._finite_gradients(step)
        self._optimizer.update(gradients, step.lr, norm)
        return StepDone(
            step=step.number,
            loss=loss,
            lr=step.lr,
            grad_norm=norm,
            tokens=sum(len(b.tokens_T) for b in step.batches),
            trained_tokens=sum(int((b.weights_T > 0).sum()) for b in step.batches),
            seconds=time.perf_counter() - started,
            memory=mx.get_peak_memory() if _on_gpu() else None,
        )

    def _finite_gradients(self, step: Step) -> tuple[float, Values, float]:
        """Return loss, gradients and their norm, all finite."""
        loss, gradients = 0.0, Values()
        for index, batch in enumerate(_cut(step.batches)):
            key = mx.random.key(micro_batch_seed(self._context.seed, step.number, index))
            share, more = self._value_and_grad(self._optimizer.values, self._rows(batch), key)
            gradients = {n: gradients[n] + g if gradients else g for n, g in more.items()}
            mx.eval(share, gradients)
            loss += share.item() / step.total_weight
        gradients = {name: g / step.total_weight for name, g in gradients.items()}
        norm = global_norm(gradients)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(loss, norm)
        return loss, gradients, norm

    def _rows(self, batch: Batch) -> Rows:
        # Few shapes if each is compiled; else minimal padding.
        return rows(batch, LENGTHS if _on_gpu() else 1)

    def _share(self, values: Values, batch: Rows, key: mx.array | None) -> mx.array:
        """Return `sum(weight * nll)` of a micro-batch, as a function of the trained values."""
        tokens_NL, index_K, targets_K, weights_K = batch
        self._injected.fill(values, self._dtype)
        self._injected.dropout.begin(key, len(self._job.start.adapter.modules))
        self._chosen.index_K = index_K
        return weighted_nll(self._injected.model(tokens_NL), targets_K, weights_K)


def _two_blocks(document: Batch) -> Batch:
    """Return the document repeated or cut to a length that needs two blocks of attention."""
    tokens_T = np.resize(document.tokens_T, BLOCK + 1)
    weights_T = np.arange(len(tokens_T)) % 4 == 0
    weights_T[-1] = False
    return Batch(
        tokens_T, np.roll(tokens_T, -1), weights_T.astype(np.float32), np.zeros(1, np.int64)
    )


def _cut(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Split the micro-batches for the device."""
    for batch in batches:
        yield from [batch] if _on_gpu() else cut_to_rows([batch], _ON_CPU)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # On the CPU, MLX compiles through the system's C++ compiler: 48 s for a tiny model, after which
    # a step took as long as before. GPU kernels compile in milliseconds.
    return mx.compile(function) if _on_gpu() else function


def _on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)
