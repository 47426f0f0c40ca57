"""Find the fastest settings by measuring: tokens per micro-batch first, then knob by knob.

Candidates change time and memory, and no number. One value changes at a time, so a search takes as
many measurements as there are values, and not their product. The plan as it stands and each
document alone, the reference, are one job; every other candidate is a job of its own, so that one
which runs out of memory spoils no other. It has to win by a margin, as its steps and those it is
compared with are not taken in turn and the machine may have had other work.

Dropout is a function of the step and the micro-batch, so with it another micro-batch is another
run: the plan's own is kept. It is compared with each document alone without dropout, and the knobs
with the plan as it stands, with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from vox_core.api.plans import RunPlan, Tell, fixed_micro_batch
from vox_core.contract import ExecutionPlan
from vox_core.errors import VoxError
from vox_plan.memory_forecast import forecast
from vox_plan.stopwatch import ALONE, Stopwatch, Timing, disagreement, undropped
from vox_plan.tuning_cache import Tuned

MARGIN = 1.05
"""Speed-up that a candidate must show: the scatter seen between two runs of the same."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of a search, by the name that `--tune-budget` takes.

    Args:
        seconds: after which no further candidate is begun.
        tokens: micro-batch sizes to try, beside the plan's.
        rounds: steps of each candidate.
        values: of a knob, its first included; 1 leaves the knobs alone.
    """

    seconds: float
    tokens: tuple[int, ...]
    rounds: int
    values: int


EFFORTS: Mapping[str, Effort] = {
    "minimal": Effort(60, (1024, 4096), 1, 1),
    "balanced": Effort(300, (1024, 4096), 2, 2),
    "full": Effort(1200, (512, 1024, 4096, 8192), 3, 99),
}


def search(run: RunPlan, tell: Tell) -> Tuned:
    """Measure the candidates that the budget allows, and choose.

    Args:
        tell: receives each measurement.

    Raises:
        VoxError: the plan as it stands cannot be carried out.
    """
    effort = EFFORTS[run.settings.tune_budget]
    given = fixed_micro_batch(run.settings, run.execution)
    return _Search(run, replace(effort, tokens=()) if given else effort, tell).result()


class _Search:
    def __init__(self, run: RunPlan, effort: Effort, tell: Tell) -> None:
        self._run, self._effort, self._tell = run, effort, tell
        self._watch = Stopwatch(run, until=time.perf_counter() + effort.seconds)
        self._plan, self._refused = run.execution, dict[str, str]()

    def result(self) -> Tuned:
        alone, untuned = self._first()
        reference = untuned if _drops(self._plan) else alone
        best = untuned
        if self._effort.tokens and alone.typical < best.typical:
            self._plan, best = replace(self._plan, micro_batch_tokens=ALONE), alone
        for changed, what in chain(self._budgets(), self._changes()):
            found = self._try(changed, what, reference)
            if found and found.typical * MARGIN < best.typical:
                self._plan, best = changed, found
        paths = self._watch.paths
        return Tuned(
            micro_batch_tokens=self._plan.micro_batch_tokens,
            tuning=dict(self._plan.tuning),
            tokens_per_second=self._per_second(best),
            untuned=self._per_second(untuned),
            refused=self._refused,
            fast=dict(paths.fast) if paths else {},
            own=dict(paths.own) if paths else {},
        )

    def _first(self) -> tuple[Timing, Timing]:
        """Each document alone, which is the reference, and the plan as it stands."""
        plan, asked = self._plan, self._plan.micro_batch_tokens
        timed = self._watch.measure(undropped(plan), [ALONE, asked], self._effort.rounds)
        alone, own = timed[ALONE], timed[asked]
        self._tell(f"each document alone: {self._rate(alone)}")
        what = f"{asked} tokens at once"
        if fault := disagreement(own, alone, plan.dtype):
            self._refuse(what, fault)
        if _drops(plan):
            own = self._watch.measure(plan, [asked], 1 + self._effort.rounds)[asked]
        self._tell(f"{what}: {own.warning or self._rate(own)}")
        return alone, own

    def _budgets(self) -> Iterator[tuple[ExecutionPlan, str]]:
        """The plan with as many other tokens at once as may fit."""
        asked = self._run.execution.micro_batch_tokens
        for tokens in self._effort.tokens:
            if self._watch.over:
                return
            if tokens != asked and self._fits(tokens):
                changed = replace(self._plan, micro_batch_tokens=tokens)
                yield changed, f"{tokens} tokens at once"

    def _fits(self, tokens: int) -> bool:
        plan = replace(self._plan, micro_batch_tokens=tokens)
        return forecast(replace(self._run, execution=plan)).fits is not False

    def _changes(self) -> Iterator[tuple[ExecutionPlan, str]]:
        """The plan as it is by then, with one knob at another value."""
        for name, values in self._run.inputs.backend.manifest.tuning.items():
            for value in values[1 : self._effort.values]:
                if self._watch.over:
                    return
                changed = replace(self._plan, tuning={**self._plan.tuning, name: value})
                yield changed, f"{name} {value}"

    def _try(self, plan: ExecutionPlan, what: str, reference: Timing) -> Timing | None:
        """Time a plan; None if it computes something else, or cannot be carried out."""
        tokens = plan.micro_batch_tokens
        try:
            # The first step of a job is slower than those after it.
            timed = self._watch.measure(plan, [tokens], 1 + self._effort.rounds)[tokens]
        except VoxError as error:
            self._refuse(what, error.what)
            return None
        if fault := timed.warning or disagreement(timed, reference, plan.dtype):
            self._refuse(what, fault)
            return None
        self._tell(f"{what}: {self._rate(timed)}")
        return timed

    def _refuse(self, what: str, fault: str) -> None:
        self._refused[what] = fault
        self._tell(f"{what}: thrown out, {fault}")

    def _rate(self, timing: Timing) -> str:
        return f"{self._per_second(timing):,.0f} tokens/s"

    def _per_second(self, timing: Timing) -> float:
        return self._watch.tokens / timing.typical


def _drops(plan: ExecutionPlan) -> bool:
    return plan.contract.adapter.dropout > 0
