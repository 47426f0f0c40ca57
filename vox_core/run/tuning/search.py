"""From candidates to an answer: the tokens computed at once first, then knob by knob.

One value is changed at a time, so a search takes as many measurements as there are values, and not
their product. A knob's new value has to win by a margin, as its steps and those it is held against
are not taken in turn and the machine may have had other work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from vox_core.config import TrainSettings
from vox_core.contract import ExecutionPlan
from vox_core.errors import VoxError
from vox_core.run.foresight import foresee
from vox_core.run.prepare import Prepared
from vox_core.run.tuning.answers import Answer, tokens_given
from vox_core.run.tuning.measure import ALONE, Taken, Track, agree

Tell: TypeAlias = Callable[[str], None]

MARGIN = 1.05
"""What a knob's value has to win by: the scatter that two runs of the same were seen to have."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What a budget buys.

    Args:
        seconds: after which no further candidate is begun.
        tokens: tried at once, beside those of the plan.
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


def search(prepared: Prepared, settings: TrainSettings, tell: Tell) -> Answer:
    """Measure what the budget buys, and choose.

    Args:
        tell: told of each measurement as it is done.

    Raises:
        VoxError: the plan as it stands cannot be carried out.
    """
    effort = EFFORTS[settings.tune_budget]
    if tokens_given(settings):
        effort = replace(effort, tokens=())
    return _Search(prepared, effort, tell).answer()


class _Search:
    def __init__(self, prepared: Prepared, effort: Effort, tell: Tell) -> None:
        self._prepared, self._effort, self._tell = prepared, effort, tell
        self._track = Track(prepared, until=time.perf_counter() + effort.seconds)
        self._plan, self._refused = prepared.plan, dict[str, str]()

    def answer(self) -> Answer:
        taken = self._track.take(self._plan, self._budgets(), self._effort.rounds)
        reference, untuned = taken[ALONE], taken[self._plan.micro_batch_tokens]
        best = untuned
        for tokens, each in taken.items():
            what = "each document alone" if tokens == ALONE else f"{tokens} tokens at once"
            if self._right(what, each, reference) and each.typical < best.typical:
                self._plan, best = replace(self._plan, micro_batch_tokens=tokens), each
        for changed, name in self._changes():
            found = self._try(changed, f"{name} {changed.tuning[name]}", reference)
            if found and found.typical * MARGIN < best.typical:
                self._plan, best = changed, found
        paths = self._track.paths
        return Answer(
            micro_batch_tokens=self._plan.micro_batch_tokens,
            tuning=dict(self._plan.tuning),
            tokens_per_second=self._rate(best),
            untuned=self._rate(untuned),
            refused=self._refused,
            fast=dict(paths.fast) if paths else {},
            own=dict(paths.own) if paths else {},
        )

    def _budgets(self) -> list[int]:
        """Each document alone, which is the reference, the plan's own, and what else may fit."""
        asked = self._plan.micro_batch_tokens
        others = [tokens for tokens in self._effort.tokens if tokens != asked]
        return [ALONE, asked, *filter(self._fits, others)]

    def _fits(self, tokens: int) -> bool:
        plan = replace(self._plan, micro_batch_tokens=tokens)
        return foresee(replace(self._prepared, plan=plan)).fits is not False

    def _changes(self) -> Iterator[tuple[ExecutionPlan, str]]:
        """The plan as it is by then, with one knob at another value, and the knob's name."""
        manifest = self._prepared.backend.found.manifest
        for name, values in (manifest.tuning if manifest else {}).items():
            for value in values[1 : self._effort.values]:
                if self._track.over:
                    return
                yield replace(self._plan, tuning={**self._plan.tuning, name: value}), name

    def _try(self, plan: ExecutionPlan, what: str, reference: Taken) -> Taken | None:
        """Time a plan; None if it computes something else, or cannot be carried out."""
        tokens = plan.micro_batch_tokens
        try:
            # The first step of a job is slower than those after it.
            taken = self._track.take(plan, [tokens], 1 + self._effort.rounds)[tokens]
        except VoxError as error:
            self._refused[what] = error.what
            self._tell(f"{what}: {error.what}")
            return None
        return taken if self._right(what, taken, reference) else None

    def _right(self, what: str, taken: Taken, reference: Taken) -> bool:
        if right := agree(taken.loss, reference.loss, self._plan.dtype):
            self._tell(f"{what}: {self._rate(taken):,.0f} tokens/s")
        else:
            self._refused[what] = f"loss {taken.loss:.6g}, expected {reference.loss:.6g}"
            self._tell(f"{what}: thrown out, {self._refused[what]}")
        return right

    def _rate(self, taken: Taken) -> float:
        return self._track.tokens / taken.typical
