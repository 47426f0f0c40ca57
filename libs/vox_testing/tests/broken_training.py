"""Ways to break training: other batches, another update, another state, another plan.

As in broken_models.py, each is a method of `mutant.answering`, or makes several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vox_core.contract import AdapterState, Batch, Trainer, TrainJob, TrainState, Update

if TYPE_CHECKING:
    from libs.vox_testing.tests.mutant import Train

NAME = "adapter"


# --- other batches --------------------------------------------------------------------------------


def on_batches(change: Callable[[Batch], Batch]) -> Any:
    """Accumulate other batches, and return what was wanted of them."""

    def accumulate(right: Any, batch: Batch, *args: Any) -> Any:
        return np.where(batch.scored_T, right.accumulate(change(batch), *args), 0)

    return accumulate


def weighing(change: Callable[[Any], Any]) -> Any:
    """Accumulate with other weights."""
    return on_batches(
        lambda batch: replace(batch, weights_T=change(batch.weights_T).astype(np.float32))
    )


def into_the_next_document(batch: Batch) -> Batch:
    targets_T, weights_T = batch.targets_T.copy(), batch.weights_T.copy()
    ends = batch.starts_D[1:] - 1
    targets_T[ends], weights_T[ends] = batch.tokens_T[batch.starts_D[1:]], 1
    return replace(batch, targets_T=targets_T, weights_T=weights_T)


def scored_is_trained(batch: Batch) -> Batch:
    idle = batch.scored_T & (batch.weights_T == 0)
    return replace(batch, weights_T=np.where(idle, 1, batch.weights_T).astype(np.float32))


def mean_of_means(weights_T: Any) -> Any:
    return weights_T / max(float(np.abs(weights_T).sum()), 1.0)


def first_hundred(right: Any, batch: Batch, *args: Any) -> Any:
    """Cut each document after 100 tokens."""
    kept = [np.arange(len(batch.tokens_T))[document][:100] for document in batch.documents()]
    which = np.concatenate(kept)
    starts_D = np.cumsum([0, *(len(each) for each in kept[:-1])])
    cut = Batch(batch.tokens_T[which], batch.targets_T[which], batch.weights_T[which], starts_D)
    found_T = np.zeros(len(batch.tokens_T), np.float32)
    found_T[which] = right.accumulate(cut, *args)
    return found_T


def seeded(change: Callable[[int], int]) -> Any:
    return lambda right, batch, seed, *args: right.accumulate(batch, change(seed), *args)


def by_count() -> dict[str, Any]:
    """The seed is the number of calls."""
    calls = itertools.count()
    return {"accumulate": seeded(lambda seed: next(calls))}


def returning(change: Callable[[Any, Batch], Any]) -> Any:
    def accumulate(right: Any, batch: Batch, *args: Any) -> Any:
        return change(right.accumulate(batch, *args), batch)

    return accumulate


def weigh_before(right: Any, batch: Batch, seed: int, learner: str, weigh: Any = None) -> Any:
    """Weights from log-probabilities without dropout."""
    if weigh is None:
        return right.accumulate(batch, seed, learner)
    weights_T = weigh(right.log_probs(batch, learner))
    return right.accumulate(replace(batch, weights_T=weights_T), seed, learner)


def weigh_twice(right: Any, batch: Batch, seed: int, learner: str, weigh: Any = None) -> Any:
    def twice(log_probs_T: Any) -> Any:
        weigh(log_probs_T)
        return weigh(log_probs_T)

    return right.accumulate(batch, seed, learner, weigh and twice)


def weigh_ignored(right: Any, batch: Batch, seed: int, learner: str, weigh: Any = None) -> Any:
    if weigh is None:
        return right.accumulate(batch, seed, learner)
    weigh(right.log_probs(batch, learner, seed))
    return right.accumulate(batch, seed, learner)


# --- several targets ------------------------------------------------------------------------------


def first_alone(weights_T: Any) -> Any:
    return weights_T if weights_T.ndim == 1 else weights_T * (np.arange(weights_T.shape[1]) == 0)


def shared(weights_T: Any) -> Any:
    if weights_T.ndim == 1:
        return weights_T
    return np.broadcast_to(weights_T.mean(1, keepdims=True), weights_T.shape).copy()


def scored_as_the_first(right: Any, batch: Batch, *others: Any) -> Any:
    log_probs_T = right.log_probs(batch, *others)
    if log_probs_T.ndim == 1:
        return log_probs_T
    return np.repeat(log_probs_T[:, :1], log_probs_T.shape[1], 1)


def first_weighed(right: Any, batch: Batch, seed: int, learner: str, weigh: Any = None) -> Any:
    changed = weigh and (lambda log_probs_T: first_alone(weigh(log_probs_T)))
    return right.accumulate(batch, seed, learner, changed)


# --- another update -------------------------------------------------------------------------------


def updating(change: Callable[[Update], Update]) -> Any:
    return lambda right, update, learner: right.update(change(update), learner)


def without_bias_correction(update: Update) -> Update:
    factor = (1 - update.beta1**update.number) / math.sqrt(1 - update.beta2**update.number)
    return replace(update, lr=update.lr * factor)


def counted() -> dict[str, Any]:
    """The backend numbers updates itself, from the state on."""
    number: dict[str, int] = {}

    def add_learner(right: Any, name: str, state: TrainState) -> None:
        number[name] = state.updates
        right.add_learner(name, state)

    def update(right: Any, update: Update, learner: str) -> float:
        number[learner] += 1
        return float(right.update(replace(update, number=number[learner]), learner))

    return {"add_learner": add_learner, "update": update}


def norm_before_division(right: Any, update: Update, learner: str) -> float:
    return float(right.update(update, learner) * update.total_weight)


def norm_after_clipping(right: Any, update: Update, learner: str) -> float:
    norm = right.update(update, learner)
    return float(min(norm, update.clip) if update.clip else norm)


def applied_anyway(right: Any, update: Update, learner: str) -> float:
    """An infinite norm is returned, and something is changed."""
    norm = right.update(update, learner)
    if not math.isfinite(norm):
        _move(right, learner, lambda name, value: value * np.float32(1.001))
    return float(norm)


def applied_with_a_finite_loss() -> dict[str, Any]:
    """The gradient's norm is not looked at, only the log-probabilities and weights are."""
    finite: list[bool] = []

    def accumulate(right: Any, batch: Batch, *args: Any) -> Any:
        finite.append(bool(np.isfinite(batch.weights_T).all()))
        return right.accumulate(batch, *args)

    def update(right: Any, update: Update, learner: str) -> float:
        skipped = not all(finite)
        finite.clear()
        return (
            float(right.update(update, learner))
            if skipped
            else applied_anyway(right, update, learner)
        )

    return {"accumulate": accumulate, "update": update}


def kept_after(*methods: str, only_failed: bool = False) -> Any:
    """What was accumulated stays after these methods."""

    def made() -> dict[str, Any]:
        pending: list[tuple[Any, ...]] = []

        def accumulate(right: Any, *args: Any) -> Any:
            pending.append(args)
            return right.accumulate(*args)

        def then(name: str) -> Any:
            def method(right: Any, *args: Any) -> Any:
                result = getattr(right, name)(*args)
                if name in methods and not (only_failed and math.isfinite(result)):
                    finite = [each for each in pending if np.isfinite(each[0].weights_T).all()]
                    for each in finite:
                        right.accumulate(*each)
                pending.clear()
                return result

            return method

        return {"accumulate": accumulate, "update": then("update"), "discard": then("discard")}

    return made


def undecayed(kind: str) -> Any:
    """Tensors whose names end so do not decay."""

    def update(right: Any, update: Update, learner: str) -> float:
        before = right.state(learner).adapter.tensors()
        norm = right.update(update, learner)
        rate = np.float32(update.lr * update.weight_decay)
        _move(right, learner, lambda n, v: v + rate * before[n] if n.endswith(kind) else v)
        return float(norm)

    return update


def _move(right: Any, learner: str, change: Callable[[str, Any], Any]) -> None:
    state = right.state(learner)
    values = {name: change(name, value) for name, value in state.adapter.tensors().items()}
    right.remove_learner(learner)
    right.add_learner(learner, replace(state, adapter=state.adapter.with_tensors(values)))


# --- another state --------------------------------------------------------------------------------


def learning_from(change: Callable[[TrainState], TrainState]) -> Any:
    """Learn from another start; method, alpha and names come back as they were given."""

    def made() -> dict[str, Any]:
        given: dict[str, AdapterState] = {}

        def add_learner(right: Any, name: str, state: TrainState) -> None:
            given[name] = state.adapter
            right.add_learner(name, change(state))

        def state(right: Any, name: str) -> TrainState:
            found = right.state(name)
            values = {**given[name].tensors(), **found.adapter.tensors()}
            moments = {n: (np.zeros_like(v), np.zeros_like(v)) for n, v in values.items()}
            adapter = given[name].with_tensors(values)
            return replace(
                found,
                adapter=adapter,
                moments={**moments, **found.moments} if found.moments else {},
            )

        return {"add_learner": add_learner, "state": state}

    return made


def with_adapter(change: Callable[[AdapterState], AdapterState]) -> Any:
    return learning_from(lambda state: replace(state, adapter=change(state.adapter)))


def another_A(adapter: AdapterState) -> AdapterState:
    modules = {p: replace(m, A_RI=m.A_RI[:, ::-1].copy()) for p, m in adapter.modules.items()}
    return replace(adapter, modules=modules)


def a_B(adapter: AdapterState) -> AdapterState:
    modules = {
        p: m if m.B_OR.any() else replace(m, B_OR=np.full_like(m.B_OR, 0.01))
        for p, m in adapter.modules.items()
    }
    return replace(adapter, modules=modules)


def without_moments(right: Any, learner: str) -> TrainState:
    return replace(right.state(learner), moments={})


def one_update_old() -> dict[str, Any]:
    old: dict[str, TrainState] = {}

    def update(right: Any, update: Update, learner: str) -> float:
        old[learner] = right.state(learner)
        return float(right.update(update, learner))

    def state(right: Any, learner: str) -> TrainState:
        return old.get(learner) or right.state(learner)

    return {"update": update, "state": state}


def views() -> dict[str, Any]:
    """States that were returned change with the learner."""
    returned: list[TrainState] = []

    def state(right: Any, learner: str) -> TrainState:
        found = right.state(learner)
        for each in returned:
            for name, value in each.adapter.tensors().items():
                np.copyto(value, found.adapter.tensors()[name])
        returned.append(found)
        return found  # type: ignore[no-any-return]

    return {"state": state}


def in_place() -> dict[str, Any]:
    """The state that was given changes."""
    given: dict[str, TrainState] = {}

    def add_learner(right: Any, name: str, state: TrainState) -> None:
        given[name] = state
        right.add_learner(name, state)

    def update(right: Any, update: Update, learner: str) -> float:
        norm = right.update(update, learner)
        values = right.state(learner).adapter.tensors()
        for name, value in given[learner].adapter.tensors().items():
            np.copyto(value, values[name])
        return float(norm)

    return {"add_learner": add_learner, "update": update}


def as_it_was() -> dict[str, Any]:
    """Scores and rows of a learner are those of its start."""

    def add_learner(right: Any, name: str, state: TrainState) -> None:
        right.add_learner(name, state)
        right.add_adapter("start", state.adapter)

    def name(adapter: str | None) -> str | None:
        return "start" if adapter == NAME else adapter

    return {
        "add_learner": add_learner,
        "log_probs": lambda right, batch, adapter=None, seed=None: right.log_probs(
            batch, name(adapter), seed
        ),
        "insert": lambda right, row, tokens_T, adapter=None: right.insert(
            row, tokens_T, name(adapter)
        ),
    }


def of_the_first() -> dict[str, Any]:
    """Gradients go to the learner that was added first."""
    learners: list[str] = []

    def add_learner(right: Any, name: str, state: TrainState) -> None:
        learners.append(name)
        right.add_learner(name, state)

    def accumulate(right: Any, batch: Batch, seed: int, learner: str) -> Any:
        right.accumulate(batch, seed, learners[0])
        return right.log_probs(batch, learner, seed)

    return {"add_learner": add_learner, "accumulate": accumulate}


def of_all(method: str) -> Any:
    """`update` or `discard` of one learner is that of all."""

    def made() -> dict[str, Any]:
        learners: list[str] = []

        def add_learner(right: Any, name: str, state: TrainState) -> None:
            learners.append(name)
            right.add_learner(name, state)

        def call(right: Any, *args: Any) -> Any:
            *update, learner = args
            for other in learners:
                if other != learner:
                    getattr(right, method)(*update, other)
            return getattr(right, method)(*args)

        return {"add_learner": add_learner, method: call}

    return made


# --- another plan ---------------------------------------------------------------------------------


def by_plan(part: str, **changes: Any) -> Any:
    """Train by a plan whose `part` ("plan", or a field of its contract) is changed."""

    def train(right: Train, job: TrainJob) -> Trainer:
        plan, contract = job.plan, job.plan.contract
        if part == "plan":
            return right(replace(job, plan=replace(plan, **changes)))
        changed = replace(getattr(contract, part), **changes)
        return right(
            replace(job, plan=replace(plan, contract=replace(contract, **{part: changed})))
        )

    return train


def squared_dropout(right: Train, job: TrainJob) -> Trainer:
    rate = job.plan.contract.adapter.dropout
    return by_plan("adapter", dropout=rate**2)(right, job)  # type: ignore[no-any-return]


_dropout = torch.nn.functional.dropout


def unscaled_dropout(x: Any, p: float, *others: Any) -> Any:
    return _dropout(x, p, *others) * (1 - p)


def base_part_undropped(module: Any, active_adapter: str, x: Any, result: Any, **_: Any) -> Any:
    """`DoraLinearVariant.forward` of PEFT, whose base part sees the input whole."""
    dora = module.lora_magnitude_vector[active_adapter]
    return result + dora(
        module.lora_dropout[active_adapter](x),
        lora_A=module.lora_A[active_adapter],
        lora_B=module.lora_B[active_adapter],
        scaling=module.scaling[active_adapter],
        base_layer=module.get_base_layer(),
        base_result=result,
        adapter_name=active_adapter,
    )


def printing(right: Train, job: TrainJob) -> Trainer:
    print("training")  # noqa: T201 - what this mutant is for
    return right(job)


def caching(right: Train, job: TrainJob) -> Trainer:
    (job.model / "cache.bin").write_bytes(b"")
    return right(job)
