"""Make plans, documents, steps and adapters for tests of a backend, without files.

Everything is a function of small integers, so that all runs of a test, and all backends, get the
same work. `vox_core.contract` defines shapes and names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vox_core.adapter.initial import generator, initial_adapter
from vox_core.adapter.targets import linear_modules, select_targets
from vox_core.contract import (
    AdapterSpec,
    AdapterState,
    Batch,
    DataIdentity,
    DType,
    ExecutionPlan,
    FineTuneContract,
    LowRank,
    Method,
    ModelIdentity,
    Optimizer,
    OptimizerSpec,
    Quant,
    Step,
    TrainState,
)
from vox_core.weights import WeightFolder

if TYPE_CHECKING:
    from vox_core.contract import Floats, Ints

    Document: TypeAlias = tuple[Ints, Floats]
    """Tokens and weights, of one length; the weight of the last position is 0."""

SEED = 7
RANK, ALPHA = 4, 8.0
"""Their quotients, 2 for LoRA and 4 for rsLoRA, are neither 1 nor one another."""


def documents(
    count: int, seed: int = 0, longest: int = 40, *, uneven: bool = False, shortest: int = 4
) -> list[Document]:
    """Make documents of unequal lengths, with about half of the positions trained.

    Args:
        longest: exclusive upper bound of a document's tokens.
        shortest: lower bound of a document's tokens.
        uneven: weights are 0.25, 0.5, … 2 instead of 1.
    """
    random = generator("documents", seed)
    made = []
    for _ in range(count):
        length = int(random.integers(shortest, longest))
        tokens = random.integers(0, 256, length)
        weights = (random.random(length) < 0.5).astype(np.float32)
        weights[1], weights[-1] = 1, 0
        if uneven:
            weights *= random.integers(1, 9, length).astype(np.float32) / 4
        made.append((tokens, weights))
    return made


def batch(some: Sequence[Document]) -> Batch:
    """Concatenate documents to a batch."""
    tokens = np.concatenate([t for t, _ in some])
    targets = np.concatenate([np.append(t[1:], 0) for t, _ in some])
    starts = np.cumsum([0, *(len(t) for t, _ in some[:-1])])
    return Batch(tokens, targets, np.concatenate([w for _, w in some]), starts)


def step(number: int, groups: Sequence[Sequence[Document]], lr: float = 1e-3) -> Step:
    """Make an optimizer step with one micro-batch per group."""
    batches = tuple(batch(group) for group in groups)
    return Step(number, batches, float(sum(b.weights_T.sum() for b in batches)), lr)


def curve(count: int, groups: int = 1, lr: float = 1e-3) -> list[Step]:
    """Make `count` steps of four documents each, split into `groups` micro-batches."""
    size = 4 // groups
    return [
        step(number, [some[i : i + size] for i in range(0, 4, size)], lr)
        for number in range(1, count + 1)
        for some in [documents(4, seed=number, uneven=True)]
    ]


def plan(
    folder: Path,
    *,
    method: Method = "lora",
    rank: int = RANK,
    optimizer: Optimizer = "adamw",
    dtype: DType = "fp32",
    quant: Quant = "none",
    dropout: float = 0.0,
    targets: tuple[str, ...] = ("all-linear",),
    clip: float = 1.0,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    seq_len: int = 64,
    total_steps: int = 20,
    seed: int = SEED,
    backend: str = "cpu",
    device: str = "cpu",
) -> ExecutionPlan:
    """Make a plan for the model of `folder`."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    contract = FineTuneContract(
        model=ModelIdentity(None, model_type, "", ""),
        data=DataIdentity("", 0, 0, 0),
        adapter=AdapterSpec(method, rank, ALPHA, dropout, targets),
        quant=quant,
        optimizer=OptimizerSpec(
            1e-3, "constant", 0.0, weight_decay, clip, beta1, beta2, eps, optimizer
        ),
        batch_size=4,
        seq_len=seq_len,
        total_steps=total_steps,
        seed=seed,
    )
    modules = select_targets(linear_modules(WeightFolder(folder).tensors, model_type), targets)
    return ExecutionPlan(contract, backend, "0", device, dtype, 4096, modules, 0, 0)


def start(folder: Path, made: ExecutionPlan) -> TrainState:
    """Return the initial state: A seeded, B zero."""
    read = WeightFolder(folder).read
    adapter = initial_adapter(made.modules, made.contract.adapter, made.contract.seed, read)
    return TrainState(0, adapter)


def stirred(state: TrainState, size: float = 0.05) -> TrainState:
    """Return `state` with a B and DoRA magnitudes that affect the logits."""
    modules = {p: _stirred(m, size, p) for p, m in state.adapter.modules.items()}
    return replace(state, adapter=AdapterState(state.adapter.method, modules))


def _stirred(module: LowRank, size: float, path: str) -> LowRank:
    random = generator("stirred", path)
    B_OR = (size * random.standard_normal(module.B_OR.shape)).astype(np.float32)
    if module.magnitude_O is None:
        return replace(module, B_OR=B_OR)
    factor_O = random.uniform(0.9, 1.1, module.magnitude_O.shape)
    return replace(
        module, B_OR=B_OR, magnitude_O=(module.magnitude_O * factor_O).astype(np.float32)
    )
