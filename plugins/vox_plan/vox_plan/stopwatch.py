"""Time steps that train nothing: the backend's own, with other settings in the same process.

At a learning rate of zero the adapter stays as it is, so each step over the same documents has the
same loss and gradient however they are cut; a candidate with others computes something else.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vox_core.api.plans import (
    Context,
    Document,
    RunPlan,
    cut,
    documents_in_step,
    seeded,
    steps_for,
)
from vox_core.contract import (
    Batch,
    DType,
    Event,
    ExecutionPlan,
    FastPaths,
    Notice,
    Step,
    StepDone,
    StepSkipped,
    TrainJob,
    TrainState,
)
from vox_core.errors import TrainingError

TOKENS = 4096
"""In the documents that are measured, about; more if one document has more."""

ALONE = 1
"""`micro_batch_tokens` that leave each document alone."""

_APART = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""How far losses may lie apart, relative: two orders of the same sums (DESIGN.md: 1e-5 in float32);
in 16 bits what `benchmarks/training` allows."""

_NORMS_APART = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""The same of gradient norms. Over cuts, layouts and threads, the tests' tiny models (llama, qwen2,
gpt2; LoRA, DoRA) were seen to differ by 1e-7 in float32, 2.3e-4 in bfloat16 and 3e-5 in float16;
deeper models sum more. Other dropout moves them by 4e-3 to 5e-2."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Steps of one candidate over the same documents.

    Args:
        seconds: of each step.
        loss, norm: of the first; without dropout they are all the same.
        warning: the first of the job, such as that memory was short.
    """

    seconds: tuple[float, ...]
    loss: float
    norm: float
    warning: str | None = None

    @property
    def typical(self) -> float:
        """The fastest: other work on the machine only ever adds to it."""
        return min(self.seconds)


@dataclass(slots=True)
class StepLog:
    """The events of one job that matter for its timing."""

    steps: list[StepDone] = field(default_factory=list)
    skipped: StepSkipped | None = None
    warning: str | None = None
    paths: FastPaths | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.steps.append(event)
        elif isinstance(event, StepSkipped):
            self.skipped = event
        elif isinstance(event, Notice) and event.level == "warning":
            self.warning = self.warning or event.message
        elif isinstance(event, FastPaths):
            self.paths = event


class Stopwatch:
    """Times steps over the run's own first documents.

    Args:
        until: deadline on the clock of `time.perf_counter`; each job takes two steps regardless.
    """

    def __init__(self, run: RunPlan, until: float = math.inf) -> None:
        self._run, self._until = run, until
        self._documents = _first_documents(run)
        self.tokens = sum(map(len, self._documents))
        self.paths: FastPaths | None = None

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.perf_counter() > self._until

    def measure(
        self, plan: ExecutionPlan, budgets: Sequence[int], rounds: int
    ) -> dict[int, Timing]:
        """Time each of `budgets` (tokens computed at once) `rounds` times, in turn.

        Budgets that the time did not suffice for are left out.

        Raises:
            VoxError: whatever the backend cannot do under this plan; a step was not finite.
        """
        order = [*budgets] * rounds
        log = self._train(plan, order)
        if self.paths is None and plan.contract == self._run.contract:
            self.paths = log.paths  # of the plan as it stands, which goes first
        timed: dict[int, Timing] = {}
        for budget in budgets:
            steps = [done for done in log.steps if order[done.step - 1] == budget]
            if steps:
                seconds = tuple(done.seconds for done in steps)
                timed[budget] = Timing(seconds, steps[0].loss, steps[0].grad_norm, log.warning)
        return timed

    def _train(self, plan: ExecutionPlan, order: Sequence[int]) -> StepLog:
        log = StepLog()
        enough = lambda: self.over and len(log.steps) > 1  # noqa: E731
        run_steps(self._run, plan, self._steps(order), len(order), log, enough)
        return log

    def _steps(self, order: Sequence[int]) -> Iterator[Step]:
        for number, budget in enumerate(order, start=1):
            batches, weight = cut(self._documents, budget, self._run.execution.packing)
            yield Step(number, batches, weight, lr=0.0, micro_batch_tokens=budget)


def run_steps(
    run: RunPlan,
    plan: ExecutionPlan,
    steps: Iterable[Step],
    total: int,
    log: StepLog,
    enough: Callable[[], bool],
    validation: Sequence[Batch] = (),
) -> None:
    """Let the backend take steps from the run's beginning, and keep nothing.

    Args:
        steps: at a learning rate of zero.
        total: at most.
        log: receives every event.
        enough: called after each step.

    Raises:
        VoxError: whatever the backend cannot do under this plan; a step was not finite.
    """
    # A plan of as many steps as there are: one that ends early reports that it was stopped.
    contract = replace(plan.contract, total_steps=total)
    job = TrainJob(
        plan=replace(plan, contract=contract),
        model=run.inputs.model.path,
        steps=steps,
        start=TrainState(0, seeded(plan, run.inputs.weights)),
        validation=validation,
    )
    with tempfile.TemporaryDirectory(prefix="vox-") as scratch:
        context = Context(
            seed=plan.contract.seed,
            scratch=Path(scratch),
            observe=log,
            stop_requested=lambda: bool(log.skipped) or enough(),
        )
        run.inputs.backend.train(job, context)
    if log.skipped:
        raise _skipped(log.skipped)


def undropped(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan without dropout, whose mask changes with the micro-batches."""
    contract = plan.contract
    adapter = replace(contract.adapter, dropout=0.0)
    return replace(plan, contract=replace(contract, adapter=adapter))


def disagreement(found: Timing, expected: Timing, dtype: DType) -> str | None:
    """How a candidate's numbers differ from the reference step's; None if they do not."""
    if not math.isclose(found.loss, expected.loss, rel_tol=_APART[dtype]):
        return f"loss {found.loss:.6g}, expected {expected.loss:.6g}"
    if not math.isclose(found.norm, expected.norm, rel_tol=_NORMS_APART[dtype]):
        return f"gradient norm {found.norm:.6g}, expected {expected.norm:.6g}"
    return None


def _skipped(step: StepSkipped) -> TrainingError:
    return TrainingError(
        "T001",
        "the loss or the gradient of a measured step is not finite",
        found=f"loss {step.loss}, gradient norm {step.grad_norm}",
        remedy="leave out --tune refresh or --measure, or use --dtype fp32",
    )


def _first_documents(run: RunPlan) -> list[Document]:
    """Those of the first steps, about `TOKENS` tokens of them."""
    contract, documents = run.contract, run.data.train
    chosen: list[Document] = []
    tokens = 0
    for step in range(1, steps_for(len(documents), contract.batch_size, 1) + 1):
        indices = documents_in_step(documents, contract.batch_size, contract.seed, step)
        for index in indices.tolist():
            document = documents[index]
            if chosen and tokens + len(document) > TOKENS:
                return chosen
            chosen.append(document)
            tokens += len(document)
    return chosen
