"""Contracts, documents and contexts for engine tests, without data files and run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vox_core.adapter.initial import generator, initial_adapter
from vox_core.adapter.targets import linear_modules, select_targets
from vox_core.contract import (
    AdapterSpec,
    Batch,
    DataIdentity,
    Event,
    ExecutionPlan,
    FineTuneContract,
    ModelIdentity,
    OptimizerSpec,
    Step,
    StepDone,
    TrainJob,
    TrainResult,
    TrainState,
)
from vox_core.run.context import Context
from vox_core.weights import WeightFolder
from vox_torch.train import Trainer

Document = tuple[np.ndarray, np.ndarray]


def documents(count: int, seed: int = 0, longest: int = 40) -> list[Document]:
    """(tokens, weights) of unequal lengths; about half of the positions are trained."""
    random = generator("documents", seed)
    made = []
    for _ in range(count):
        length = int(random.integers(4, longest))
        tokens = random.integers(0, 256, length)
        weights = (random.random(length) < 0.5).astype(np.float32)
        weights[1], weights[-1] = 1, 0
        made.append((tokens, weights))
    return made


def batch(some: Sequence[Document]) -> Batch:
    tokens = np.concatenate([t for t, _ in some])
    targets = np.concatenate([np.append(t[1:], 0) for t, _ in some])
    starts = np.cumsum([0, *(len(t) for t, _ in some[:-1])])
    return Batch(tokens, targets, np.concatenate([w for _, w in some]), starts)


def step(number: int, groups: Sequence[Sequence[Document]], lr: float = 1e-3) -> Step:
    """One optimizer step of as many micro-batches as there are groups."""
    batches = tuple(batch(group) for group in groups)
    return Step(number, batches, float(sum(b.weights_T.sum() for b in batches)), lr)


def plan(
    folder: Path,
    *,
    method: str = "lora",
    dtype: str = "fp32",
    dropout: float = 0.0,
    targets: tuple[str, ...] = ("all-linear",),
    clip: float = 1.0,
    total_steps: int = 20,
) -> ExecutionPlan:
    weights = WeightFolder(folder)
    model_type = json_model_type(folder)
    contract = FineTuneContract(
        model=ModelIdentity(None, model_type, "", ""),
        data=DataIdentity("", 0, 0, 0),
        adapter=AdapterSpec(method, 4, 8.0, dropout, targets),
        quant="none",
        optimizer=OptimizerSpec(1e-3, "constant", 0.0, 0.0, clip),
        batch_size=4,
        seq_len=64,
        total_steps=total_steps,
        seed=7,
    )
    modules = select_targets(linear_modules(weights.tensors, model_type), targets)
    return ExecutionPlan(contract, "cpu", "0", "cpu", dtype, 4096, modules, 0, 0)


def json_model_type(folder: Path) -> str:
    import json

    return json.loads((folder / "config.json").read_text())["model_type"]


def start(folder: Path, made: ExecutionPlan) -> TrainState:
    read = WeightFolder(folder).read
    adapter = initial_adapter(made.modules, made.contract.adapter, made.contract.seed, read)
    return TrainState(0, adapter)


def train(
    folder: Path,
    steps: Sequence[Step],
    made: ExecutionPlan | None = None,
    state: TrainState | None = None,
    **context: object,
) -> tuple[TrainResult, list[Event]]:
    """Train in this process; returns the result and every event."""
    made = made or plan(folder, total_steps=steps[-1].number)
    events: list[Event] = []
    job = TrainJob(made, folder, steps, state or start(folder, made))
    working = Context(made.contract.seed, folder, events.append, **context)
    return Trainer(job, working, "cpu").run(), events


def losses(events: Sequence[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepDone)]
