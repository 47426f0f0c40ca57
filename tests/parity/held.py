"""One backend's numbers for a tiny model, so that two backends' can be held against each other.

Work is that of `vox_testing.jobs`: the same documents, seeds and adapters for each backend.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vox_core.contract import (
    AdapterState,
    ExecutionPlan,
    LoadJob,
    MergeJob,
    MergeTarget,
    Method,
    Model,
    Step,
    StepDone,
    TrainJob,
    TrainState,
    probe_document,
)
from vox_core.run.generate import Generator, Prompt
from vox_core.run.learner import Learner
from vox_core.run.sampling import Sampling
from vox_core.weights import WeightFolder
from vox_testing import jobs
from vox_testing.subject import Recorder
from vox_testing.tiny import make_model

STEPS = 20
# With the tests' usual spread of 0.2, gradients of this family reach 600, and float32 and float64
# part ways within twenty steps on any backend.
SPREAD = {"qwen3_5": 0.05}
PROMPT_T = np.random.default_rng(0).integers(0, 256, 40)


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of training: the state, the numbers of each step, and the states on the way."""

    state: TrainState
    losses: list[float]
    norms: list[float]
    checkpoints: list[TrainState]


def hooks(backend: str) -> Any:
    """A backend's hooks. Its package is imported here: not every machine has all of them."""
    return importlib.import_module(f"vox_{backend}").backend


@functools.cache
def model(root: Path, family: str) -> Path:
    """The tiny model of a family, under `root`."""
    return make_model(family, root / family, spread=SPREAD.get(family))


def train(backend: str, folder: Path, count: int = STEPS, **plan: Any) -> Trained:
    """`count` steps of two micro-batches each, from the seeded start."""
    made = jobs.plan(folder, **plan)
    return go_on(backend, folder, jobs.start(folder, made), jobs.curve(count, groups=2), **plan)


def go_on(
    backend: str,
    folder: Path,
    start: TrainState,
    steps: Sequence[Step],
    *,
    keep_every: int = 0,
    **plan: Any,
) -> Trained:
    """The steps given, from any state; every so many of them a state is kept, if that is not 0."""
    made, done, kept = jobs.plan(folder, **plan), list[StepDone](), list[TrainState]()
    with learning(hooks(backend), made, folder, start, steps, Recorder()) as learner:
        for step in steps:
            taken = learner.take(step)
            assert isinstance(taken, StepDone)
            done.append(taken)
            if keep_every and step.number % keep_every == 0:
                kept.append(learner.state().copy())
        state = learner.state()
    return Trained(state, [e.loss for e in done], [e.grad_norm for e in done], kept)


@contextmanager
def learning(
    backend: Any,
    plan: ExecutionPlan,
    folder: Path,
    start: TrainState,
    steps: Sequence[Step],
    context: Recorder,
) -> Iterator[Learner]:
    """A learner of `backend`, as the loop of a run has one."""
    document = probe_document(steps[0].batches) if steps else None
    job = TrainJob(plan, folder, document)
    with closing(backend.vox_train(job, context)) as trainer:
        yield Learner(trainer, start, plan.contract.optimizer, plan.contract.seed)


def adapter(folder: Path, method: Method) -> AdapterState:
    """An adapter with an effect, the same for every backend."""
    return jobs.stirred(jobs.start(folder, jobs.plan(folder, method=method))).adapter


def logits(backend: str, folder: Path, state: AdapterState | None = None) -> Any:
    """float32 (T, V) of the prompt."""
    with loaded(backend, folder, state) as (model, name):
        return model.logits(PROMPT_T, name)


def greedy(backend: str, folder: Path, state: AdapterState, count: int = 24) -> list[int]:
    """The next tokens after the prompt."""
    with loaded(backend, folder, state) as (model, name):
        return generated(model, PROMPT_T.tolist(), count, name)


def generated(model: Model, prompt: list[int], count: int, adapter: str | None = None) -> list[int]:
    """The `count` most likely tokens after `prompt`."""
    prompts = [Prompt(prompt, Sampling(max_tokens=count), adapter=adapter)]
    return [token.id for token in Generator(model).generate(prompts)]


@contextmanager
def loaded(
    backend: str, folder: Path, state: AdapterState | None = None
) -> Iterator[tuple[Model, str | None]]:
    """A model in float32, and the name of its adapter."""
    with closing(hooks(backend).vox_load(LoadJob(folder, "fp32"), Recorder())) as model:
        if state is not None:
            model.add_adapter("adapter", state)
        yield model, state and "adapter"


def merged(backend: str, folder: Path, state: AdapterState) -> dict[str, Any]:
    """Every merged tensor, in float32."""
    modules = jobs.plan(folder).modules
    targets = tuple(MergeTarget(path, modules[path]) for path in state.modules)
    job = MergeJob(state, targets, WeightFolder(folder).read, "fp32")
    return dict(hooks(backend).vox_merge(job, None).tensors)


def distance(mine: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Relative Frobenius norm of the difference, over all tensors together."""
    assert mine.keys() == other.keys()
    squares = [(np.sum((mine[n] - other[n]) ** 2.0), np.sum(other[n] ** 2.0)) for n in other]
    difference, size = np.sum(squares, axis=0)
    return float(np.sqrt(difference / size))


def apart(mine: Any, other: Any) -> float:
    """Relative Frobenius norm of the difference of two arrays."""
    return distance({"": mine}, {"": other})
