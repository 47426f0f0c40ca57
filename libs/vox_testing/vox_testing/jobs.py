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
from vox_core.adapter.targets import (
    linear_modules,
    parameter_names,
    select_targets,
    trained_parameters,
)
from vox_core.contract import (
    AdapterSpec,
    AdapterState,
    Batch,
    DataIdentity,
    DType,
    ExecutionPlan,
    FineTuneContract,
    Floats,
    Ints,
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


def without_scores(some: Batch) -> Batch:
    """Return `some`, scored where it is trained and nowhere else."""
    return Batch(some.tokens_T, some.targets_T, some.weights_T, some.starts_D)


def signed(some: Batch, seed: int = 0) -> Batch:
    """Return `some`, scored wherever there is a target, with weights of both signs at about half of
    those positions."""
    random = generator("signed", seed)
    scored_T = np.ones(len(some.tokens_T), bool)
    scored_T[[document.stop - 1 for document in some.documents()]] = False
    weights_T = random.standard_normal(len(scored_T)) * (random.random(len(scored_T)) < 0.5)
    return replace(some, weights_T=(weights_T * scored_T).astype(np.float32), scored_T=scored_T)


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
    targets: tuple[str, ...] | None = None,
    modules_to_save: tuple[str, ...] = (),
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
    """Make a plan for the model of `folder`; `modules_to_save` are whole paths. Without `targets`
    adapters are on every linear module, and the method `full` trains every weight."""
    config = json.loads((folder / "config.json").read_text())
    model_type, full = config["model_type"], method == "full"
    if targets is None:
        targets = () if full else ("all-linear",)
    spec = AdapterSpec(method, rank, ALPHA, dropout, targets, modules_to_save)
    contract = FineTuneContract(
        model=ModelIdentity(None, model_type, "", ""),
        data=DataIdentity("", 0, 0, 0),
        adapter=AdapterSpec("full", 0, 0.0, 0.0, targets) if full else spec,
        quant=quant,
        optimizer=OptimizerSpec(
            1e-3, "constant", 0.0, weight_decay, clip, beta1, beta2, eps, optimizer
        ),
        batch_size=4,
        seq_len=seq_len,
        total_steps=total_steps,
        seed=seed,
    )
    tensors = WeightFolder(folder).tensors
    names = parameter_names(tensors, model_type)
    saved = {f"{path}.weight": names[f"{path}.weight"] for path in modules_to_save}
    modules = select_targets(linear_modules(tensors, model_type), targets)
    if full:
        tied = bool(config.get("tie_word_embeddings"))
        saved, modules = trained_parameters(tensors, model_type, targets, tied=tied), {}
    return ExecutionPlan(contract, backend, "0", device, dtype, 4096, modules, 0, 0, saved)


def start(folder: Path, made: ExecutionPlan) -> TrainState:
    """Return the initial state: A seeded, B zero."""
    read = WeightFolder(folder).read
    spec, seed = made.contract.adapter, made.contract.seed
    return TrainState(0, initial_adapter(made.modules, spec, seed, read, made.saved))


def stirred(state: TrainState, size: float = 0.05, seed: int = 0) -> TrainState:
    """Return `state` with a B, DoRA magnitudes and whole tensors that affect the logits."""

    def noise(path: str, like: Floats) -> Floats:
        drawn = generator("stirred", seed, path).standard_normal(like.shape)
        return (size * drawn).astype(np.float32)

    def changed(path: str, module: LowRank) -> LowRank:
        m_O = module.magnitude_O
        return replace(
            module,
            B_OR=noise(path, module.B_OR),
            magnitude_O=None if m_O is None else m_O * (1 + noise(f"{path} m", m_O)),
        )

    adapter = state.adapter
    modules = {path: changed(path, module) for path, module in adapter.modules.items()}
    saved = {name: value + noise(name, value) for name, value in adapter.saved.items()}
    return replace(state, adapter=AdapterState(adapter.method, modules, saved))
