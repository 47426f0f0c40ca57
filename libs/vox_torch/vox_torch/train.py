"""The training loop: the same for every device.

loss of a step = sum(weight * nll) / total_weight, over the step; each micro-batch contributes its
share, so the result does not depend on how the step was cut. Randomness (dropout) is seeded per
(run seed, step, micro-batch).
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from vox_core.contract import RunContext, Step, StepDone, TrainJob, TrainResult, TrainState
from vox_core.contract.loop import follow, micro_batch_seed, not_finite
from vox_torch.base import load_base
from vox_torch.inject import attach
from vox_torch.loss import Rows, rows, weighted_nll
from vox_torch.optimizer import MasterAdamW
from vox_torch.profile import ComputeDType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from vox_core.contract import Batch


class Trainer:
    """One run on one device: the adapted model, its optimizer and the way from step to step."""

    def __init__(
        self,
        job: TrainJob,
        context: RunContext,
        device: str,
        compute_dtype: ComputeDType | None = None,
    ) -> None:
        contract = job.plan.contract
        base = load_base(job.model, compute_dtype or job.plan.dtype, device)
        self._adapted = attach(base, job.start.adapter, contract.adapter.dropout)
        self._head = self._adapted.model.get_output_embeddings()
        if job.plan.gradient_checkpointing:
            self._adapted.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = MasterAdamW(self._adapted.parameters, contract.optimizer)
        self._optimizer.restore(job.start)
        self._job, self._context, self._device = job, context, device

    def run(self) -> TrainResult:
        """Take every step of the job, or stop when asked to."""
        return follow(self._job, self._context, self)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Weighted mean loss over `batches`."""
        import torch

        total, weight = 0.0, 0.0
        self._adapted.model.eval()
        with torch.inference_mode():
            for batch in batches:
                laid = rows(batch, self._device)
                total += float(weighted_nll(self._adapted.model, self._head, laid))
                weight += float(batch.weights_T.sum())
        return total / weight

    def state(self, step: int) -> TrainState:
        """Masters and moments after `step`."""
        return self._optimizer.state(step, self._job.start.adapter)

    def step(self, step: Step) -> StepDone:
        """Take one optimizer step."""
        started = time.perf_counter()
        only_adapter_dropout(self._adapted.model)
        loss = sum(
            self._micro_batch(rows(batch, self._device), step, index)
            for index, batch in enumerate(step.batches)
        )
        if not math.isfinite(loss):
            raise not_finite("loss", loss)
        norm = self._optimizer.update(step.lr)
        return StepDone(
            step=step.number,
            loss=loss,
            lr=step.lr,
            grad_norm=norm,
            tokens=sum(len(b.tokens_T) for b in step.batches),
            trained_tokens=sum(int((b.weights_T > 0).sum()) for b in step.batches),
            seconds=time.perf_counter() - started,
        )

    def _micro_batch(self, batch: Rows, step: Step, index: int) -> float:
        import torch

        torch.manual_seed(micro_batch_seed(self._context.seed, step.number, index))
        loss = weighted_nll(self._adapted.model, self._head, batch) / step.total_weight
        loss.backward()
        self._optimizer.collect()
        return loss.item()


def only_adapter_dropout(model: nn.Module) -> None:
    """Training mode for the adapter's dropout alone.

    A base's own dropout (GPT-2 has 0.1 in four places) would make the first loss another than the
    base model's, and another on each backend. Layers that recompute their activations do so in
    training mode only; theirs is the layer's own flag, and not that of the modules in it. So is
    that of PEFT's layers, without which its DoRA drops nothing.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.eval()
    for name, module in model.named_modules():
        if name.endswith(".lora_dropout"):
            module.train()
        elif isinstance(module, GradientCheckpointingLayer):
            module.training = module.gradient_checkpointing
        elif hasattr(module, "lora_dropout"):
            module.training = True
