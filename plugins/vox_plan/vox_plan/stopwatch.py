"""Time steps that train nothing: the backend's own, with other settings in the same process.

At a learning rate of zero the adapter stays as it is, so each step over the same documents has the
same loss and gradient however they are cut; a candidate with others computes something else.

`--measure` takes the first steps of the run, its own documents in its own micro-batches; the first
is a warm-up and counts as loading. The time of the other steps, and of validations, of which some
batches are taken, follows from their tokens. Checkpoints are left out: they are written beside the
training. Without it the time follows from tuning, or from an earlier run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vox_core.api import plans
from vox_core.api.models import Context
from vox_core.api.plans import Document, RunPlan, Tell
from vox_core.api.runs import Summary, read_run, runs_in
from vox_core.api.training import Learner
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
    Validation,
    probe_document,
)
from vox_core.errors import AdapterError, TrainingError
from vox_plan.report import SpeedPlan, StepPlan
from vox_plan.tuning_cache import Tuned

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

STEPS = 8
"""At most, after the first."""
LEAST = 2
"""At least, after the first, whatever the time."""
RUNS = 20
"""Earlier runs to read, at most."""
SECONDS = 20.0
"""After which no further step begins."""


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
    """The events of one job that matter for its timing.

    Args:
        began, first, last: times of the start, of the first step's end, and of the last event.
        validations: seconds of each.
    """

    steps: list[StepDone] = field(default_factory=list)
    warning: str | None = None
    paths: FastPaths | None = None
    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    validations: list[float] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, StepDone):
            self.first = self.first or now
            self.steps.append(event)
        elif isinstance(event, Validation):
            self.validations.append(now - self.last)
        elif isinstance(event, Notice) and event.level == "warning":
            self.warning = self.warning or event.message
        elif isinstance(event, FastPaths):
            self.paths = event
        self.last = now


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
        order, log = [*budgets] * rounds, StepLog()
        enough = lambda: self.over and len(log.steps) > 1  # noqa: E731
        run_steps(self._run, plan, list(self._steps(order)), log, enough)
        if self.paths is None and plan.contract == self._run.contract:
            self.paths = log.paths  # of the plan as it stands, which goes first
        timed: dict[int, Timing] = {}
        for budget in budgets:
            steps = [done for done in log.steps if order[done.step - 1] == budget]
            if steps:
                seconds = tuple(done.seconds for done in steps)
                timed[budget] = Timing(seconds, steps[0].loss, steps[0].grad_norm, log.warning)
        return timed

    def _steps(self, order: Sequence[int]) -> Iterator[Step]:
        for number, budget in enumerate(order, start=1):
            batches, weight = plans.cut(self._documents, budget, self._run.execution.packing)
            yield Step(number, batches, weight, lr=0.0)


def run_steps(
    run: RunPlan,
    plan: ExecutionPlan,
    steps: Sequence[Step],
    log: StepLog,
    enough: Callable[[], bool],
    validation: Sequence[Batch] = (),
) -> None:
    """Let the backend take steps from the run's beginning, and keep nothing.

    Args:
        steps: at a learning rate of zero.
        log: receives every event.
        enough: called after each step.

    Raises:
        VoxError: whatever the backend cannot do under this plan; a step was not finite.
    """
    job = TrainJob(plan, run.inputs.model.path, probe_document(steps[0].batches))
    start, contract = TrainState(0, plans.seeded(plan, run.inputs.weights)), plan.contract
    with closing(run.inputs.backend.train(job, Context(log))) as trainer:
        learner = Learner(trainer, start, contract.optimizer, contract.seed)
        if validation:
            log(Validation(0, learner.evaluate(validation)))
        for step in steps:
            done = learner.take(step)
            if isinstance(done, StepSkipped):
                raise _skipped(done)
            log(done)
            if step.evaluate:
                log(Validation(step.number, learner.evaluate(validation)))
            if enough():
                break


def undropped(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan without dropout, whose mask changes with the micro-batches."""
    contract = plan.contract
    adapter = replace(contract.adapter, dropout=0.0)
    return replace(plan, contract=replace(contract, adapter=adapter))


def disagreement(found: Timing, expected: Timing, dtype: DType) -> str | None:
    """Compare a candidate's loss and gradient norm with the reference step's; None if equal."""
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
    """Return the documents of the first steps, about `TOKENS` tokens of them."""
    chosen, tokens = list[Document](), 0
    for step in range(1, plans.steps_for(len(run.data.train), run.contract.batch_size, 1) + 1):
        for document in _documents(run, step):
            if chosen and tokens + len(document) > TOKENS:
                return chosen
            chosen.append(document)
            tokens += len(document)
    return chosen


def _documents(run: RunPlan, step: int) -> list[Document]:
    contract, documents = run.contract, run.data.train
    indices = plans.documents_in_step(documents, contract.batch_size, contract.seed, step)
    return [documents[index] for index in indices.tolist()]


# --- the time of a run ----------------------------------------------------------------------------


@dataclass(slots=True)
class Measured:
    """Timing of some steps.

    Args:
        seconds: of `tokens` tokens in `steps` steps, after the first.
        loading: seconds before the first step, and what that took longer than those after it.
        validating: seconds a token of a validation; None without held-out rows.
        memory: peak bytes in use until then; None if unknown.
    """

    steps: int
    tokens: int
    seconds: float
    loading: float
    validating: float | None
    memory: int | None
    log: StepLog


def measure(run: RunPlan, tell: Tell) -> Measured:
    """Take some steps of the run, and keep nothing.

    Raises:
        VoxError: whatever the backend cannot do under this plan; a step was not finite.
    """
    total = min(run.contract.total_steps, 1 + STEPS)
    valid = _some(run)
    until = time.perf_counter() + SECONDS
    tell("measuring some steps of the run")

    log = StepLog()
    enough = lambda: time.perf_counter() > until and len(log.steps) > LEAST  # noqa: E731
    run_steps(run, run.execution, list(_steps(run, total)), log, enough, valid)
    return _measured(log, valid)


def speed(
    run: RunPlan, steps: StepPlan, measured: Measured | None, tuned: Tuned | None
) -> SpeedPlan | None:
    """From the steps just measured, or from tuning, or from the newest run like it beside it; None
    if there is none of them."""
    tokens = steps.work.tokens if steps.work else None
    if measured is None and tuned is None:
        return _earlier(run, tokens)
    plan = _tuned(tuned, tokens) if tuned else SpeedPlan(0.0)
    if measured is None:
        return plan
    rate, paths = measured.tokens / measured.seconds, measured.log.paths
    valid = run.data.valid.tokens * steps.validations if run.data.valid else 0
    return replace(
        plan,
        tokens_per_second=rate,
        seconds=tokens / rate if tokens else None,
        how="measured",
        steps=measured.steps,
        measured=time.time(),
        loading=measured.loading,
        validating=None if measured.validating is None else measured.validating * valid,
        fast=dict(paths.fast) if paths else plan.fast,
        own=dict(paths.own) if paths else plan.own,
    )


def _earlier(run: RunPlan, tokens: int | None) -> SpeedPlan | None:
    """The tokens/s of a run of the same model, backend, device and precision: of the newest runs,
    the one with most steps, as the first ones of a run are slow."""
    plan = run.execution
    wanted = (run.inputs.model.id, plan.backend, plan.device, plan.dtype, plan.contract.quant)
    longest: Summary | None = None
    for folder in _newest(run.run.path.parent):
        with suppress(AdapterError):
            found = read_run(folder)
            same = (found.model, found.backend, found.device, found.dtype, found.quant) == wanted
            if same and found.tokens_per_second and len(found.losses) > _length(longest):
                longest = found
    if longest is None or not (rate := longest.tokens_per_second):
        return None
    return SpeedPlan(
        tokens_per_second=rate,
        seconds=tokens / rate if tokens else None,
        measured=longest.last or 0.0,
        how="earlier",
        steps=_length(longest),
        run=longest.run,
    )


def _length(run: Summary | None) -> int:
    return len(run.losses) if run else 0


def _newest(runs: Path) -> list[Path]:
    with suppress(AdapterError, OSError):
        return sorted(runs_in(runs), key=lambda run: run.stat().st_mtime)[: -1 - RUNS : -1]
    return []


def _tuned(tuned: Tuned, tokens: int | None) -> SpeedPlan:
    return SpeedPlan(
        tokens_per_second=tuned.tokens_per_second,
        seconds=tokens / tuned.tokens_per_second if tokens else None,
        chosen=str(tuned),
        gain=tuned.gain,
        refused=tuned.refused,
        fast=tuned.fast,
        own=tuned.own,
        measured=tuned.measured,
    )


def _measured(log: StepLog, valid: Sequence[Batch]) -> Measured:
    first, *rest = log.steps
    counted = rest or [first]  # a run of one step
    tokens, seconds = sum(d.tokens for d in counted), sum(d.seconds for d in counted)
    loading = log.first - log.began - first.tokens * seconds / tokens
    validating = None
    if valid:
        took = log.validations[-1]
        validating = took / sum(len(batch.tokens_T) for batch in valid)
        loading -= took  # that before the first step
    told = [step.memory for step in log.steps if step.memory is not None]
    memory = max(told) if told else plans.peak_resident()
    return Measured(len(counted), tokens, seconds, max(loading, 0.0), validating, memory, log)


def _steps(run: RunPlan, total: int) -> Iterator[Step]:
    plan = run.execution
    for number in range(1, total + 1):
        batches, weight = plans.cut(_documents(run, number), plan.micro_batch_tokens, plan.packing)
        # Of the first, whose validation is as warm as those of the run.
        evaluate = number == 1 and run.data.valid is not None
        yield Step(number, batches, total_weight=weight, lr=0.0, evaluate=evaluate)


def _some(run: RunPlan) -> Sequence[Batch]:
    """Batches of a validation, spread over it, of about `TOKENS` tokens."""
    if run.data.valid is None:
        return ()
    plan = run.execution
    every = plans.ValidationBatches(run.data.valid, plan.micro_batch_tokens, plan.packing)
    stride = max(1, run.data.valid.tokens // TOKENS)
    return [every[index] for index in range(0, len(every), stride)]
