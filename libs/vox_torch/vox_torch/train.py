"""The training loop of the torch engine, for every device.

loss of a step = sum(weight * nll) / total_weight, over the step: gradients are those of the sum,
divided once in float32, so the result does not depend on the micro-batches.
Randomness (dropout) is seeded per (run seed, step, micro-batch).

The host waits for the device only at the end of a step, to read loss and gradient norm.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from vox_core.contract import (
    DType,
    FastPaths,
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
from vox_torch.base import load_base
from vox_torch.inject import Adapted, attach
from vox_torch.lora import fuse
from vox_torch.memory import Shortage, give_back, halved
from vox_torch.optimizer import MasterAdamW
from vox_torch.profile import DeviceProfile, set_threads, wants_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

    from vox_core.contract import Batch
    from vox_torch.forward import Loss
    from vox_torch.reference_check import Reference

T = TypeVar("T")

_NOT_FAST = (
    "vox's own functions do not compute this model as transformers does: {fault}. This run uses "
    "transformers' own modules: its numbers are right, and it takes more time and memory. Please "
    "report it with the model's name"
)
_NOT_CHECKED = (
    "vox's own functions are not checked: transformers could not compute a document of this run to "
    "compare with ({error})"
)

# Loss scales for the backward pass in float16, which overflows at 65504; the first that keeps every
# gradient finite is used. Tried anew at each step, so that a resumed run finds the same one.
_FLOAT16_SCALES = tuple(2.0**-n for n in range(0, 25, 4))


class Trainer:
    """One run on one device: the adapted model, its optimizer and the steps."""

    def __init__(self, job: TrainJob, context: RunContext, profile: DeviceProfile) -> None:
        steps = iter(job.steps)
        first = next(steps, None)
        self._job = replace(job, steps=itertools.chain([first] if first else [], steps))
        self._document = probe_document(first.batches) if first else None
        self._context, self._profile, self._device = context, profile, profile.device
        self._seed = seed_on(self._device)
        self._memory = Shortage(job.plan, self._device)
        with self._memory.final():
            self._prepare(job.plan.dtype)

    def _prepare(self, dtype: DType) -> None:
        """Load the model and move everything to the device."""
        from vox_torch.forward import Padded

        job, contract = self._job, self._job.plan.contract
        set_threads(job.plan.tuning)
        self._adapted = self._load(dtype)
        self._loss = self._checked_fast_path() or Padded(self._load_again(dtype), self._device)
        self._recut = job.plan.packing == "end-to-end" and isinstance(self._loss, Padded)
        if job.plan.gradient_checkpointing:
            recompute_activations(self._adapted.model.get_base_model())
        self._optimizer = MasterAdamW(self._adapted.parameters, contract.optimizer)
        self._optimizer.restore(job.start)
        self._scales = _FLOAT16_SCALES if dtype == "fp16" else (1.0,)
        give_back()

    def _load(self, dtype: DType) -> Adapted:
        contract = self._job.plan.contract
        base = load_base(self._job.model, dtype, self._device, contract.quant)
        if self._profile.prepare:
            self._profile.prepare(base)
        return attach(base, self._job.start.adapter, contract.adapter.dropout)

    def _load_again(self, dtype: DType) -> PeftModel:
        """Free the model, and load it again as transformers and PEFT compute it."""
        del self._adapted
        gc.collect()  # fused layers and their forwards know each other
        self._memory.release()
        self._adapted = self._load(dtype)
        return self._adapted.model

    def _checked_fast_path(self) -> Loss | None:
        """Put vox's own functions into the model; None if their results differ from it."""
        from vox_torch.fused_modules import fuse_modules
        from vox_torch.trial import loss_of

        model, reference = self._adapted.model, self._reference()
        reasons = fuse(model)
        fused = fuse_modules(model)
        rows = wants_rows(self._job.plan.tuning)
        loss, padded = loss_of(model, self._device, rows=rows)
        if reference and (fault := reference.fault(loss)):
            self._context.emit(Notice(_NOT_FAST.format(fault=fault), "warning"))
            return None
        if padded:
            self._context.emit(Notice(f"documents are computed in padded rows: {padded}"))
        self._context.emit(fast_paths(reasons.values(), fused))
        return loss

    def _reference(self) -> Reference | None:
        """Return the reference for the fast path; None if nothing is left to train or it cannot be
        computed."""
        from vox_torch.reference_check import NOT_UNDERSTOOD, Reference

        if self._document is None:
            return None
        model, parameters = self._adapted.model, self._adapted.parameters
        try:
            return Reference(model, self._document, parameters, self._device)
        except NOT_UNDERSTOOD as error:
            said = str(error).partition("\n")[0]
        self._memory.release()
        self._context.emit(Notice(_NOT_CHECKED.format(error=said), "warning"))
        return None

    def run(self) -> TrainResult:
        """Take every step of the job, or stop on request."""
        return follow(self._job, self._context, self)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the weighted mean loss over `batches`."""
        import torch

        def losses(parts: Sequence[Batch]) -> float:
            return sum(float(self._loss(part)) for part in parts)

        total, weight = 0.0, 0.0
        self._adapted.model.eval()
        with torch.inference_mode():
            for batch in batches:
                total += self._within_memory(losses, self._cut([batch]))
                weight += float(batch.weights_T.sum())
        return total / weight

    def state(self, step: int) -> TrainState:
        """Return masters and moments after `step`."""
        return self._optimizer.state(step, self._job.start.adapter)

    def step(self, step: Step) -> StepDone:
        """Take one optimizer step.

        Raises:
            NotFinite: T001, the loss or the gradient is not finite; the state is unchanged.
            TrainingError: T002, out of memory.
        """
        started = time.perf_counter()
        with before_update():
            only_adapter_dropout(self._adapted.model)
            loss, norm = self._finite_gradients(step)
        with self._memory.final():
            self._optimizer.update(step.lr, norm)
        return StepDone(
            step=step.number,
            loss=loss,
            lr=step.lr,
            grad_norm=norm,
            tokens=sum(len(b.tokens_T) for b in step.batches),
            trained_tokens=sum(int((b.weights_T > 0).sum()) for b in step.batches),
            seconds=time.perf_counter() - started,
            memory=self._memory.peak(),
        )

    def _finite_gradients(self, step: Step) -> tuple[float, float]:
        """Return loss and gradient norm, both finite; the optimizer holds the gradients."""
        batches = self._cut(step.batches, step.micro_batch_tokens)
        for scale in self._scales:
            gradients = partial(self._gradients, step, scale)
            loss, norm = self._within_memory(gradients, batches)
            if math.isfinite(loss) and math.isfinite(norm):
                return loss, norm
            self._optimizer.forget()
            if not math.isfinite(loss):
                break
        raise NotFinite(loss, norm)

    def _cut(self, batches: Sequence[Batch], tokens: int = 0) -> Sequence[Batch]:
        """Split the micro-batches again, if documents planned for concatenation are padded."""
        if not self._recut:
            return batches
        return cut_to_rows(batches, tokens or self._job.plan.micro_batch_tokens)

    def _within_memory(
        self, compute: Callable[[Sequence[Batch]], T], batches: Sequence[Batch]
    ) -> T:
        """Compute `batches`, or smaller ones after the first out-of-memory."""
        if not self._memory.met:
            try:
                return compute(batches)
            except (RuntimeError, MemoryError) as error:
                told = self._memory.meet(error)
            self._optimizer.forget()
            self._memory.release()
            self._context.emit(told)
        with self._memory.final():
            return compute(halved(batches))

    def _gradients(self, step: Step, scale: float, batches: Sequence[Batch]) -> tuple[float, float]:
        import torch

        losses = [self._micro_batch(b, step, i, scale) for i, b in enumerate(batches)]
        norm = self._optimizer.norm()
        loss = torch.stack(losses).sum() / step.total_weight
        both: tuple[float, float] = loss.item(), norm.item()
        return both

    def _micro_batch(self, batch: Batch, step: Step, index: int, scale: float) -> torch.Tensor:
        self._seed(micro_batch_seed(self._context.seed, step.number, index))
        loss = self._loss(batch, scale)
        loss.backward()
        self._optimizer.collect(1 / (scale * step.total_weight))
        return loss.detach() / scale


def seed_on(device: str) -> Callable[[int], object]:
    """Seed the random numbers of `device`, and so a step's dropout.

    `torch.manual_seed` gives the CPU the same seed and goes on to every accelerator. Before an
    accelerator's first use it records the caller's whole stack each time: 0.1 ms per micro-batch.
    """
    import torch

    on_cpu = torch.device(device).type == "cpu"
    return torch.default_generator.manual_seed if on_cpu else torch.manual_seed


def fast_paths(reasons: Iterable[str | None], modules: Mapping[str, int]) -> FastPaths:
    """Return the event that lists the fused modules.

    Args:
        reasons: why an adapter is not computed in one function; None for those that are.
        modules: kind -> number of the base's modules that were fused.
    """
    found = Counter(reasons)
    fused = found.pop(None, 0)
    fast = {kind: count for kind, count in {"adapters": fused, **modules}.items() if count}
    return FastPaths(fast, {f"adapters with {reason}": n for reason, n in found.items()})


def recompute_activations(base: PreTrainedModel) -> None:
    """Enable gradient checkpointing, by the installed transformers' name for it."""
    enable = getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def only_adapter_dropout(model: nn.Module) -> None:
    """Enable training mode for the adapter's dropout only.

    A base's own dropout (GPT-2 has 0.1 in four places) would change the first loss from the base
    model's, differently on each backend. Layers recompute activations in training mode only, by the
    layer's own flag, not those of its modules. PEFT's layers need their own flag, too; without it
    DoRA has no dropout.
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
