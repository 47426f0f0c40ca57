"""Steps that train nothing, timed: the backend's own, with other settings in the same process.

At a rate of zero the adapter stays what it is, so each step over the same documents has the same
loss however they are cut; a candidate whose loss is another one computes something else.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vox_core.adapter.initial import initial_adapter
from vox_core.contract import (
    AdapterState,
    DType,
    Event,
    ExecutionPlan,
    FastPaths,
    Step,
    StepDone,
    TrainJob,
    TrainState,
)
from vox_core.data.encode import Document
from vox_core.data.order import cut, documents_of_step, steps_for
from vox_core.run.context import Context
from vox_core.run.prepare import Prepared
from vox_core.run.trained import as_trained

TOKENS = 4096
"""Of the documents that are measured with, about; more if the longest one has more."""

ALONE = 1
"""A budget of tokens at once that leaves each document alone."""

_APART = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""How far losses may lie apart, relative: two orders of the same sums (DESIGN.md: 1e-5 in float32);
in 16 bits what `benchmarks/training` allows."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Steps of one candidate over the same documents.

    Args:
        seconds: of each step.
        loss: of the first; they are all the same.
    """

    seconds: tuple[float, ...]
    loss: float

    @property
    def typical(self) -> float:
        """The fastest: other work on the machine only ever adds to it."""
        return min(self.seconds)


@dataclass(slots=True)
class Seen:
    """What a job told while it was measured."""

    steps: list[StepDone] = field(default_factory=list)
    paths: FastPaths | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.steps.append(event)
        elif isinstance(event, FastPaths):
            self.paths = event


class Track:
    """The run's own first documents, to be gone over again and again.

    Args:
        until: when to stop, as `time.perf_counter` counts; of each job two steps are taken
            whatever the time.
    """

    def __init__(self, prepared: Prepared, until: float = math.inf) -> None:
        self._prepared, self._until = prepared, until
        self._documents = _first_documents(prepared)
        self.tokens = sum(map(len, self._documents))
        self.paths: FastPaths | None = None

    @property
    def over(self) -> bool:
        """Whether the time is."""
        return time.perf_counter() > self._until

    def take(self, plan: ExecutionPlan, budgets: Sequence[int], rounds: int) -> dict[int, Taken]:
        """Time each of `budgets` (tokens computed at once) `rounds` times, in turn.

        Budgets that the time did not suffice for are left out.

        Raises:
            VoxError: whatever the backend cannot do under this plan.
        """
        seen, order = Seen(), [*budgets] * rounds
        with tempfile.TemporaryDirectory(prefix="vox-") as scratch:
            context = Context(
                seed=plan.contract.seed,
                scratch=Path(scratch),
                observe=seen,
                stop_requested=lambda: self.over and len(seen.steps) > 1,
            )
            self._prepared.backend.train(self._job(plan, order), context)
        # Of the plan as it stands, which goes first.
        self.paths = self.paths or seen.paths
        taken: dict[int, Taken] = {}
        for budget in budgets:
            steps = [done for cut, done in zip(order, seen.steps, strict=False) if cut == budget]
            if steps:
                taken[budget] = Taken(tuple(done.seconds for done in steps), steps[0].loss)
        return taken

    def _job(self, plan: ExecutionPlan, order: Sequence[int]) -> TrainJob:
        # A plan of as many steps as there are: what is stopped early is told as stopped.
        contract = replace(plan.contract, total_steps=len(order))
        return TrainJob(
            plan=replace(plan, contract=contract),
            model=self._prepared.model.path,
            steps=self._steps(order),
            start=TrainState(0, self._adapter(plan)),
        )

    def _steps(self, order: Sequence[int]) -> Iterator[Step]:
        for number, budget in enumerate(order, start=1):
            batches, weight = cut(self._documents, budget)
            yield Step(number, batches, total_weight=weight, lr=0.0)

    def _adapter(self, plan: ExecutionPlan) -> AdapterState:
        prepared, contract = self._prepared, plan.contract
        weights = as_trained(
            prepared.weights, contract.quant, contract.model.model_type, plan.dtype
        )
        return initial_adapter(
            plan.modules, contract.adapter, contract.seed, weights.read, plan.saved
        )


def agree(found: float, expected: float, dtype: DType) -> bool:
    """Whether a candidate's loss is the reference step's."""
    return math.isclose(found, expected, rel_tol=_APART[dtype])


def _first_documents(prepared: Prepared) -> list[Document]:
    """Those of the first steps, about `TOKENS` tokens of them."""
    contract, documents = prepared.plan.contract, prepared.train.documents
    chosen: list[Document] = []
    tokens = 0
    for step in range(1, steps_for(len(documents), contract.batch_size, 1) + 1):
        for index in documents_of_step(
            len(documents), contract.batch_size, contract.seed, step
        ).tolist():
            document = documents[index]
            if chosen and tokens + len(document) > TOKENS:
                return chosen
            chosen.append(document)
            tokens += len(document)
    return chosen
