"""Learners on one base model, for every device of torch.

A learner's gradients are summed in float32 or wider, undivided, so the result does not depend on
the micro-batches; `update` divides them once. Dropout is a function of the micro-batch's seed.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from vox_core.contract import (
    Batch,
    Doubles,
    FastPaths,
    Floats,
    Notice,
    RunContext,
    Trainer,
    TrainJob,
    TrainState,
    Update,
    Weigh,
)
from vox_torch.base import load_base, torch_dtype
from vox_torch.forward import Loss, Padded, Together
from vox_torch.inject import Adapters, require_every_weight
from vox_torch.layout import Part, Scores, halves, in_rows, joined, scored_of, whole
from vox_torch.load import SMALLER, TorchModel
from vox_torch.lora import Sharing, fuse
from vox_torch.memory import Shortage, give_back
from vox_torch.optimizer import MasterAdamW
from vox_torch.profile import DeviceProfile, threads, wants_rows
from vox_torch.ranks import Ranks
from vox_torch.shards import Shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from vox_torch.reference_check import Reference

Found = TypeVar("Found")
Accumulate: TypeAlias = "tuple[Batch, int, str, Weigh | None]"
"""Arguments of `accumulate`."""

_NOT_FAST = (
    "vox's own functions do not compute this model as transformers does: {fault}. This run uses "
    "transformers' own modules: its numbers are right, and it takes more time and memory. Please "
    "report it with the model's name"
)
_NOT_CHECKED = (
    "vox's own functions are not checked: transformers could not compute a document of this run to "
    "compare with ({error})"
)

# Loss scales for the backward pass in float16, which overflows at 65504; the first that keeps
# every gradient finite is used. Tried anew for each micro-batch, so that a resumed run finds the
# same one.
_FLOAT16_SCALES = tuple(2.0**-n for n in range(0, 25, 4))


class TorchTrainer(TorchModel, Trainer):
    """`vox_core.contract.Trainer` over a transformers model."""

    answer_limit = "--rollout-tokens"

    def __init__(self, job: TrainJob, context: RunContext, profile: DeviceProfile) -> None:
        self._plan, self._job, self._context, self._profile = job.plan, job, context, profile
        self._seed = seed_on(profile.device)
        self._memory = Shortage(job.plan, profile.device)
        self._scales = _FLOAT16_SCALES if job.plan.dtype == "fp16" else (1.0,)
        self._learners: dict[str, MasterAdamW] = {}
        self._fused = True
        self._sharing: Sharing | None = None
        self._threads = ExitStack()
        self._threads.enter_context(threads(job.plan.tuning))
        self._ranks = Ranks(context.world) if context.world.size > 1 else None
        self._shards = Shards(self._ranks) if self._ranks and job.shard else None
        with self._memory.final():
            super().__init__(self._load(), profile.device)
        if not self._memory.may_quantise:
            self.smaller = SMALLER

    def add_learner(self, name: str, state: TrainState) -> None:
        with self._memory.final():
            parameters = self._attach(name, state)
            self._set_up(name, documents=True)  # the model may have generated
            if self._loss is None:
                self._loss = self._checked_fast_path(parameters)
            if self._loss is None:
                del parameters  # of the model that is freed
                parameters = self._attach_again(name, state)
                self._loss = Padded(self._adapters.base, self._device)
            if self._plan.gradient_checkpointing and not self._learners:
                recompute_activations(self._adapters.base)
            if self._shards:
                self._shards.learn(self._adapters.base)
            kind, shards = self._plan.contract.optimizer.name, self._shards
            self._learners[name] = MasterAdamW(parameters, kind, state, self._ranks, shards)
        self._modules_changed()
        give_back()

    def remove_learner(self, name: str) -> None:
        del self._learners[name]
        self.remove_adapter(name)

    def accumulate(
        self, batch: Batch, seed: int, learner: str, weigh: Weigh | None = None
    ) -> Floats:
        optimizer = self._learners[learner]
        if weigh is None:
            self._set_up(learner, documents=True, dropout=True)
            return self._in_parts(batch, seed, partial(self._gradient, optimizer))
        once = _Once(weigh)
        if len(self._parts(batch)) == 1:
            self._set_up(learner, documents=True, dropout=True)
            compute = partial(self._gradient, optimizer, weigh=once)
            log_probs_T = self._attempt(lambda: compute(batch, seed))
            if log_probs_T is not None:
                return log_probs_T.spread(len(batch.tokens_T))
        # Of several parts, all log-probabilities come first.
        if once.weights_T is None:
            once(self.log_probs(batch, learner, seed))
        return self.accumulate(replace(batch, weights_T=once.weights_T), seed, learner)

    def accumulate_all(self, calls: Sequence[Accumulate]) -> list[Floats]:
        if self._can_share(calls):
            calls = [(*call, weigh and _Once(weigh)) for *call, weigh in calls]
            found = self._attempt(partial(self._gradients, calls))
            if found is not None:
                return found
        return super().accumulate_all(calls)

    def log_probs(
        self, batch: Batch, adapter: str | None = None, seed: int | None = None
    ) -> Floats:
        self._set_up(adapter, documents=True, dropout=seed is not None)
        if seed is None:
            return self._in_parts(batch, 0, lambda part, _seed: self._scores(part))
        return self._in_parts(batch, seed, self._scores)

    def update(self, update: Update, learner: str) -> float:
        self._read_again()
        with self._memory.final():
            return self._learners[learner].update(update)

    def discard(self, learner: str) -> None:
        self._learners[learner].forget()

    def state(self, learner: str) -> TrainState:
        return self._learners[learner].state()

    def share(self, values_N: Doubles) -> Doubles:
        return self._ranks.share(values_N) if self._ranks else values_N

    def peak_memory(self) -> int | None:
        return self._memory.peak()

    def close(self) -> None:
        if self._ranks:
            self._ranks.close()  # until then others may read what the learners have
        self._learners.clear()
        if self._shards:
            self._shards.close()
        self._threads.close()
        super().close()

    @contextmanager
    def _generating(self) -> Iterator[None]:
        with super()._generating(), self._together():
            yield

    def _together(self) -> AbstractContextManager[None]:
        """Guard a computation in which all ranks of a split base take part."""
        return self._ranks.computing() if self._shards and self._ranks else nullcontext()

    def _load(self) -> Adapters:
        plan = self._plan
        if self._shards:
            trained = plan.saved if plan.contract.adapter.method == "full" else ()
            dtype = torch_dtype(plan.dtype)
            return Adapters(self._shards.load(self._job.model, dtype, trained))
        base = load_base(self._job.model, plan.dtype, self._profile.device, plan.contract.quant)
        if self._profile.prepare:
            self._profile.prepare(base)
        return Adapters(base)

    def _attach(self, name: str, state: TrainState) -> Mapping[str, nn.Parameter]:
        spec = self._plan.contract.adapter
        parameters = self._adapters.add(name, state.adapter, spec.dropout)
        if spec.method == "full" and not spec.targets:
            require_every_weight(self._adapters.base, parameters)
        return parameters

    def _attach_again(self, name: str, state: TrainState) -> Mapping[str, nn.Parameter]:
        """Free the model, and load it again as transformers and PEFT compute it."""
        self._batch = self._by_row = None
        del self._adapters
        gc.collect()  # fused layers and their forwards know each other
        self._memory.release()
        self._fused = False
        self._adapters = self._load()
        return self._attach(name, state)

    def _modules_changed(self) -> None:
        self._dropout = self._sharing = None
        self._read_again()
        if self._fused:
            fuse(self._adapters.base)

    def _checked_fast_path(self, parameters: Mapping[str, nn.Parameter]) -> Loss | None:
        """Put vox's own functions into the model; None if their results differ from it."""
        from vox_torch.fused_modules import fuse_modules
        from vox_torch.trial import loss_of

        base, reference = self._adapters.base, self._reference(parameters)
        reasons = fuse(base)
        fused = fuse_modules(base)
        loss, padded = loss_of(base, self._device, rows=wants_rows(self._plan.tuning))
        fault = reference.fault(loss) if reference else None
        if self._ranks and self._ranks.most(int(fault is not None)):
            fault = fault or "another process has found so"  # all compute the same way
        if fault:
            self._context.emit(Notice(_NOT_FAST.format(fault=fault), "warning"))
            return None
        if padded:
            self._context.emit(Notice(f"documents are computed in padded rows: {padded}"))
        self._context.emit(fast_paths(reasons.values(), fused))
        return loss

    def _reference(self, parameters: Mapping[str, nn.Parameter]) -> Reference | None:
        """Return the reference for the fast path; None if nothing is left to train or it cannot be
        computed."""
        from vox_torch.reference_check import NOT_UNDERSTOOD, Reference

        if self._job.document is None:
            return None
        try:
            return Reference(self._adapters.base, self._job.document, parameters, self._device)
        except NOT_UNDERSTOOD as error:
            said = str(error).partition("\n")[0]
        self._memory.release()
        self._context.emit(Notice(_NOT_CHECKED.format(error=said), "warning"))
        return None

    def _parts(self, batch: Batch) -> list[Part]:
        """Split a batch as far as layout and memory need it."""
        parts = [whole(batch)]
        if self._plan.packing == "end-to-end" and isinstance(self._loss, Padded):
            parts = in_rows(batch, self._plan.micro_batch_tokens)
        return [half for part in parts for half in halves(part)] if self._memory.met else parts

    def _in_parts(self, batch: Batch, seed: int, compute: Callable[[Batch, int], Scores]) -> Floats:
        """Return the log-probabilities of a batch, computed in parts, which are halved after the
        first out-of-memory."""
        import numpy as np

        log_probs_T = np.zeros(batch.targets_T.shape, np.float32)
        seeds, pending = itertools.count(seed), self._parts(batch)
        while pending:
            part, *rest = pending
            scores = self._attempt(partial(compute, part.batch, next(seeds)))
            if scores is None:
                pending = [half for each in pending for half in halves(each)]
                continue
            log_probs_T[part.positions] = scores.spread(len(part.positions))
            pending = rest
        return log_probs_T

    def _attempt(self, compute: Callable[[], Found]) -> Found | None:
        """Return the result of `compute`; None after the first out-of-memory.

        Raises:
            TrainingError: T002, out of memory again, or the others wait within the same pass.
        """
        if self._shards:
            with self._memory.final(), self._together():
                return compute()
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            told = self._memory.meet(error)
        for optimizer in self._learners.values():
            optimizer.drop()
        self._memory.release()
        self._context.emit(told)
        return None

    def _scores(self, batch: Batch, seed: int | None = None) -> Scores:
        import torch

        assert self._loss is not None
        if seed is not None:
            self._seed(seed)
        with torch.inference_mode():
            return self._loss.log_probs(batch)

    def _gradient(
        self, optimizer: MasterAdamW, batch: Batch, seed: int, weigh: Weigh | None = None
    ) -> Scores:
        """Add the gradient of a batch to those of `optimizer`."""
        assert self._loss is not None
        if weigh is None and not (batch.weights_T != 0).any():
            return self._scores(batch, seed)
        for scale in self._scales:
            optimizer.drop()  # what a larger scale gave
            self._seed(seed)
            loss, scores = self._loss(batch, scale, weigh)
            loss.backward()
            last = scale == self._scales[-1]
            if last or not bool(loss.isfinite()) or optimizer.is_finite():
                break
        optimizer.collect(1 / scale)
        return scores

    def _can_share(self, calls: Sequence[Accumulate]) -> bool:
        """Whether the base can compute these batches of several learners in one pass."""
        learners = {learner for _, _, learner, _ in calls}
        alone = len(learners) < max(2, len(calls)) or self._ranks or self._memory.met
        if alone or len(self._scales) > 1 or not isinstance(self._loss, Together):
            return False
        if len({batch.targets_T.shape[1:] for batch, *_ in calls}) > 1:
            return False
        if self._sharing is None:
            self._sharing = Sharing(self._adapters.base)
        return all(self._sharing.fits(self._adapters.key(each)) for each in learners)

    def _gradients(self, calls: Sequence[Accumulate]) -> list[Floats]:
        """Add the gradients of several learners. Each computes its own low-rank products, and a
        head that it trains; the other products are those of all tokens."""
        loss, sharing = self._loss, self._sharing
        assert isinstance(loss, Together)
        assert sharing is not None
        batches, _, learners, _ = zip(*calls, strict=True)
        counts = [len(each.tokens_T) for each in batches]
        keys = [self._adapters.key(each) for each in learners]
        self._set_up(learners[0], documents=True, dropout=True)
        found: dict[str, Floats] = {}
        with sharing.computing([(str(k), n) for k, n in zip(keys, counts, strict=True)]) as leaves:
            hidden_TH = loss.body(joined(batches))
            leaf_TH = hidden_TH.detach().requires_grad_()
            heads: dict[object, list[tuple[Accumulate, torch.Tensor]]] = {}
            for call, key, own_TH in zip(calls, keys, leaf_TH.split(counts), strict=True):
                head = call[3] is None if sharing.only_body(key) else key
                heads.setdefault(head, []).append((call, own_TH))
            for some in heads.values():
                found.update(self._head_gradients(loss, some))
            hidden_TH.backward(leaf_TH.grad)
        for parameter, leaf in leaves.items():
            parameter.grad = leaf.grad
        for learner in learners:
            self._learners[learner].collect(1.0)
        return [found[learner] for learner in learners]

    def _head_gradients(
        self, loss: Together, calls: Sequence[tuple[Accumulate, torch.Tensor]]
    ) -> Iterator[tuple[str, Floats]]:
        """Take the gradients with respect to the hidden states of calls, in one pass over the head;
        return the log-probabilities by learner."""
        import numpy as np
        import torch

        given, hidden = zip(*calls, strict=True)
        batches, _, learners, weighs = zip(*given, strict=True)
        ends = np.cumsum([len(each.tokens_T) for each in batches])[:-1]
        batch = joined(batches)

        def weigh(log_probs_T: Floats) -> Floats:
            parts = zip(weighs, np.split(log_probs_T, ends), strict=True)
            return np.concatenate([each(part_T) for each, part_T in parts])

        self._select(learners[0], dropout=True)
        scored = scored_of(batch, self._device)
        of_batch, scores = loss.head(
            torch.cat(hidden), batch, scored, weigh=weigh if weighs[0] else None
        )
        of_batch.backward()
        log_probs_T = scores.spread(len(batch.tokens_T))
        return zip(learners, np.split(log_probs_T, ends), strict=True)


class _Once:
    """Calls `weigh` once, and gives the same weights again when a batch is computed again."""

    def __init__(self, weigh: Weigh) -> None:
        self._weigh = weigh
        self.weights_T: Floats | None = None

    def __call__(self, log_probs_T: Floats) -> Floats:
        if self.weights_T is None:
            self.weights_T = self._weigh(log_probs_T)
        return self.weights_T


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
