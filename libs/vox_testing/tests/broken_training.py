"""Ways to break training: other work, another start, another plan, other words.

Each stands before the right hook and is given it: `train(right, job, context)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vox_core.contract import (
    AdapterState,
    Batch,
    RunContext,
    Step,
    StepDone,
    TrainJob,
    TrainResult,
    TrainState,
)
from vox_core.contract.loop import NotFinite
from vox_core.weights import numpy_dtype

Train = Callable[[TrainJob, RunContext], TrainResult]


# --- training on other work -----------------------------------------------------------------------


def on_steps(change: Callable[[Step, TrainJob], Step]) -> Any:
    """Train on changed steps, and tell the learning rates that were asked for."""

    def train(right: Train, job: TrainJob, context: RunContext) -> TrainResult:
        asked: dict[int, float] = {}

        def steps() -> Iterator[Step]:
            for step in job.steps:
                asked[step.number] = step.lr
                yield change(step, job)

        def tell(event: Any) -> None:
            is_step = isinstance(event, StepDone)
            context.emit(replace(event, lr=asked[event.step]) if is_step else event)

        return right(replace(job, steps=steps()), Listening(context, emit=tell))

    return train


def on_batches(change: Callable[[Batch], Batch], weigh_again: bool = False) -> Any:
    def changed(step: Step, _job: TrainJob) -> Step:
        batches = tuple(change(batch) for batch in step.batches)
        weight = float(sum(batch.weights_T.sum() for batch in batches))
        return replace(
            step, batches=batches, total_weight=weight if weigh_again else step.total_weight
        )

    return on_steps(changed)


def mean_of_means(step: Step, _job: TrainJob) -> Step:
    share = step.total_weight / len(step.batches)
    batches = tuple(
        replace(
            batch, weights_T=batch.weights_T * np.float32(share / max(batch.weights_T.sum(), 1))
        )
        for batch in step.batches
    )
    return replace(step, batches=batches)


def one_document(batch: Batch) -> Batch:
    return replace(batch, starts_D=batch.starts_D[:1])


def into_the_next_document(batch: Batch) -> Batch:
    targets_T, weights_T = batch.targets_T.copy(), batch.weights_T.copy()
    ends = batch.starts_D[1:] - 1
    targets_T[ends], weights_T[ends] = batch.tokens_T[batch.starts_D[1:]], 1
    return replace(batch, targets_T=targets_T, weights_T=weights_T)


def first_hundred(batch: Batch) -> Batch:
    """Tokens of each document."""
    kept = [np.arange(len(batch.tokens_T))[document][:100] for document in batch.documents()]
    which = np.concatenate(kept)
    starts_D = np.cumsum([0, *(len(each) for each in kept[:-1])])
    return Batch(batch.tokens_T[which], batch.targets_T[which], batch.weights_T[which], starts_D)


def every_token(batch: Batch) -> Batch:
    return replace(batch, weights_T=np.ones_like(batch.weights_T))


def trained_or_not(batch: Batch) -> Batch:
    return replace(batch, weights_T=(batch.weights_T > 0).astype(np.float32))


def finite(batch: Batch) -> Batch:
    return replace(batch, weights_T=np.nan_to_num(batch.weights_T, posinf=0.0))


def without_bias_correction(step: Step, job: TrainJob) -> Step:
    spec, number = job.plan.contract.optimizer, step.number
    factor = (1 - spec.beta1**number) / math.sqrt(1 - spec.beta2**number)
    return replace(step, lr=step.lr * factor)


def constant_rate(step: Step, job: TrainJob) -> Step:
    return replace(step, lr=job.plan.contract.optimizer.lr)


# --- training from another start, by another plan -------------------------------------------------


def from_start(change: Callable[[TrainState], TrainState]) -> Any:
    """Train from a changed start; alpha and method come back as they were given."""

    def train(right: Train, job: TrainJob, context: RunContext) -> TrainResult:
        result = right(replace(job, start=change(job.start)), context)
        adapter = job.start.adapter.with_tensors(result.state.adapter.tensors())
        return replace(result, state=replace(result.state, adapter=adapter))

    return train


def with_adapter(change: Callable[[AdapterState], AdapterState]) -> Any:
    return from_start(lambda state: replace(state, adapter=change(state.adapter)))


def by_plan(part: str, **changes: Any) -> Any:
    """Train by a plan whose `part` ("plan", or a field of its contract) is changed."""

    def train(right: Train, job: TrainJob, context: RunContext) -> TrainResult:
        plan, contract = job.plan, job.plan.contract
        if part == "plan":
            return right(replace(job, plan=replace(plan, **changes)), context)
        changed = replace(getattr(contract, part), **changes)
        plan = replace(plan, contract=replace(contract, **{part: changed}))
        return right(replace(job, plan=plan), context)

    return train


def leaving_gradients(trainer: Any, step: Step) -> tuple[float, float]:
    """`Trainer._finite_gradients`, which forgets nothing."""
    loss, norm = trainer._gradients(step, 1.0, step.batches)
    if not math.isfinite(loss):
        raise NotFinite(loss, norm)
    return loss, norm


def squared_dropout(right: Train, job: TrainJob, context: RunContext) -> TrainResult:
    rate = job.plan.contract.adapter.dropout
    return by_plan("adapter", dropout=rate**2)(right, job, context)  # type: ignore[no-any-return]


_dropout = torch.nn.functional.dropout


def unscaled_dropout(x: Any, p: float, *others: Any) -> Any:
    return _dropout(x, p, *others) * (1 - p)


def unscaled(adapter: AdapterState) -> AdapterState:
    modules = {p: replace(m, alpha=float(m.rank)) for p, m in adapter.modules.items()}
    return AdapterState("lora" if adapter.method == "rslora" else adapter.method, modules)


def alpha_over_r(adapter: AdapterState) -> AdapterState:
    return replace(adapter, method="lora" if adapter.method == "rslora" else adapter.method)


def without_effect(adapter: AdapterState) -> AdapterState:
    modules = {p: replace(m, B_OR=np.zeros_like(m.B_OR)) for p, m in adapter.modules.items()}
    return replace(adapter, modules=modules)


def without_magnitude(adapter: AdapterState) -> AdapterState:
    modules = {p: replace(m, magnitude_O=None) for p, m in adapter.modules.items()}
    return AdapterState("lora" if adapter.method == "dora" else adapter.method, modules)


def rounded(adapter: AdapterState) -> AdapterState:
    short = numpy_dtype("BF16")
    return adapter.with_tensors(
        {name: value.astype(short).astype(np.float32) for name, value in adapter.tensors().items()}
    )


def another_A(adapter: AdapterState) -> AdapterState:
    modules = {p: replace(m, A_RI=m.A_RI[:, ::-1].copy()) for p, m in adapter.modules.items()}
    return replace(adapter, modules=modules)


def a_B(adapter: AdapterState) -> AdapterState:
    modules = {
        p: m if m.B_OR.any() else replace(m, B_OR=np.full_like(m.B_OR, 0.01))
        for p, m in adapter.modules.items()
    }
    return replace(adapter, modules=modules)


# --- training that listens or speaks otherwise ----------------------------------------------------


class Listening:
    """A context with some of its attributes changed."""

    def __init__(self, context: RunContext, **changed: Any) -> None:
        self._context, self._changed = context, changed

    def __getattr__(self, name: str) -> Any:
        return self._changed[name] if name in self._changed else getattr(self._context, name)


def listening(change: Callable[[RunContext], dict[str, Any]]) -> Any:
    def train(right: Train, job: TrainJob, context: RunContext) -> TrainResult:
        return right(job, Listening(context, **change(context)))

    return train


def telling(kind: type, change: Callable[[Any], Any]) -> Any:
    """Emit events of `kind` changed; None is not emitted."""

    def emit_through(context: RunContext) -> dict[str, Any]:
        def emit(event: Any) -> None:
            if (told := change(event) if isinstance(event, kind) else event) is not None:
                context.emit(told)

        return {"emit": emit}

    return listening(emit_through)


def one_step_old(right: Train, job: TrainJob, context: RunContext) -> TrainResult:
    states: list[TrainState] = []

    def keep(state: TrainState) -> None:
        states.append(state)
        if context.checkpoint_due(state.step):
            context.checkpoint(state)

    heard = Listening(context, checkpoint=keep, checkpoint_due=lambda step: True)
    result = right(job, heard)
    old = states[-2] if len(states) > 1 else job.start
    return replace(result, state=replace(old, step=result.state.step))


def without_moments(right: Train, job: TrainJob, context: RunContext) -> TrainResult:
    result = right(job, context)
    return replace(result, state=replace(result.state, moments={}))


def checkpoints_that_change(right: Train, job: TrainJob, context: RunContext) -> TrainResult:
    kept: list[TrainState] = []

    def keep(state: TrainState) -> None:
        kept.append(state)
        context.checkpoint(state)

    result = right(job, Listening(context, checkpoint=keep))
    for state in kept:
        for name, value in state.adapter.tensors().items():
            np.copyto(value, result.state.adapter.tensors()[name])
    return result


def changing_its_start(right: Train, job: TrainJob, context: RunContext) -> TrainResult:
    result = right(job, context)
    for name, value in job.start.adapter.tensors().items():
        np.copyto(value, result.state.adapter.tensors()[name])
    return result


def printing(right: Train, job: TrainJob, context: RunContext) -> TrainResult:
    print("training")  # noqa: T201 - what this mutant is for
    return right(job, context)
