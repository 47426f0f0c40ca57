"""Decide by a gate whether one model is to replace another: yes, no, or not enough evidence.

    name = "production"            # the name that a yes moves
    suites = ["suite.toml"]        # beside the gate
    cycles = 2                     # parts of each task's rows; or seeds = [1, 2]
    backends = ["cpu", "mlx"]

    [[require]]
    task = "sums"
    superior = 0.05                # better; an improvement of 0.05 would matter

    [[require]]
    task = "capitals"
    not-inferior = 0.03            # worse by less than 0.03

    [limits]
    seconds-per-answer = 2

A requirement is met if a one-sided test at 2.5 % shows it over all cycles, and each cycle's
difference alone points the same way. Each cycle must have enough rows to show the requirement by
itself, were all of them won: six. A cycle of fewer rows cannot confirm anything. A requirement has
failed if the same test shows the opposite: that the improvement is below the one that would matter,
or the loss above the margin. Everything else is not enough evidence. Other tasks are guarded: one
that is shown to be worse (Holm over them) is a no, and one whose rows are of a single source stays
undecided.

All requirements have to be met, so that the chance of a wrong yes is that of a single test (the
intersection-union test: Berger 1982, "Multiparameter hypothesis testing and acceptance sampling",
Technometrics 24). The decision is a function of scorecards and measurements alone.

Shape legend: N rows, or clusters of rows.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, ValidationError, model_validator

from vox_core.api.models import NAME
from vox_core.api.settings import DTypeChoice, Names, Section, Seed, settings_faults
from vox_core.errors import ConfigError
from vox_eval import statistics
from vox_eval.scorecard import Scorecard, difference_interval, units
from vox_eval.statistics import ONE_SIDED, POWER, Doubles, Interval, above, mean
from vox_eval.suites import Suite, Task

Answer: TypeAlias = Literal["yes", "no", "not enough evidence"]
State: TypeAlias = Literal["met", "failed", "undecided"]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Evidence: TypeAlias = Mapping[str, tuple[Sequence[Scorecard], Sequence[Scorecard]]]
"""Backend -> scorecards of candidate and current model: one of each, or one for each seed."""

SAME = 1e-4
"""Largest difference of a score on two backends that is roundoff, relative to 1 or the score."""
DIFFERENCES = "backend-differences"


class Requirement(Section):
    """A `[[require]]` of a gate."""

    section: ClassVar[str] = "require"

    task: str
    superior: Positive | None = None
    not_inferior: Positive | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.superior is None) == (self.not_inferior is None):
            raise ValueError(f"task {self.task!r}: write superior or not-inferior, one of them")
        return self

    @property
    def bound(self) -> float:
        """Bound that the difference has to exceed."""
        return 0.0 if self.not_inferior is None else -self.not_inferior

    @property
    def planned(self) -> float:
        """The difference for which the power is computed."""
        return self.superior or 0.0

    def fewest(self, *, binary: bool) -> int:
        """Rows that show it at best: if all are won, or, against a margin, if all are ties."""
        if not (binary and self.not_inferior):
            return math.ceil(-math.log2(ONE_SIDED))  # of 2^n signs, only one is as good
        z, margin = NormalDist().inv_cdf(1 - ONE_SIDED), self.not_inferior
        return max(1, math.ceil(z**2 * (1 - margin) / margin))  # Tango's score test

    def __str__(self) -> str:
        if self.superior is not None:
            return f"superior, {self.superior:g} matters"
        return f"not inferior by {self.not_inferior:g}"


class Limits(Section):
    """`[limits]` of a gate."""

    section: ClassVar[str] = "limits"

    leakage: Share = 0.0
    megabytes: Positive | None = None
    seconds_per_answer: Positive | None = None
    backend_differences: Share = 0.0


class Gate(Section):
    """A gate as it stands in its file."""

    section: ClassVar[str] = "gate"

    name: str = "production"
    suites: Annotated[Names, Field(min_length=1)]
    cycles: Annotated[int, Field(ge=2, le=20)] = 2
    seeds: tuple[Seed, ...] = ()
    backends: Names = ()
    dtype: DTypeChoice = "auto"
    require: Annotated[tuple[Requirement, ...], Field(min_length=1)]
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if not NAME.fullmatch(self.name):
            raise ValueError("name: write up to 64 letters, digits, dots, hyphens and underscores")
        tasks = [each.task for each in self.require]
        if twice := next((task for task in tasks if tasks.count(task) > 1), None):
            raise ValueError(f"two requirements of the task {twice!r}")
        if self.seeds and (len({*self.seeds}) < 2 or "cycles" in self.model_fields_set):
            raise ValueError("seeds: write two seeds or more, and no cycles beside them")
        if len({*self.backends}) < len(self.backends):
            raise ValueError("backends: one is named twice")
        return self

    def to_json(self) -> dict[str, Any]:
        """Return every setting, defaults included, as the file could have it."""
        found = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        if self.seeds:
            del found["cycles"]
        return found

    @property
    def parts(self) -> int:
        """Number of parts that the rows are split into. With seeds, each cycle has all rows."""
        return 1 if self.seeds else self.cycles

    @property
    def compute_dtype(self) -> DTypeChoice:
        """With several backends float32, in which they agree."""
        return "fp32" if self.dtype == "auto" and len(self.backends) > 1 else self.dtype


@dataclass(frozen=True, slots=True)
class Finding:
    """Evidence about a task on a backend, and its verdict.

    Args:
        demand: the requirement, or "not worse" for a guard.
        rows: clusters of rows, where rows name their source.
        gain: mean difference of the scores, positive if the candidate is better; `interval` is at
            95 %.
        p: one-sided, of what has to be shown; of a guard, that the candidate is worse.
        cycles: the gain in each.
        rows_needed: if undecided, rows that show the gain as it is, or the one that would matter if
            that is larger, with a power of 80 %; None: more than 100,000.
    """

    task: str
    backend: str
    demand: str
    rows: int
    gain: float
    interval: Interval | None
    cycles: tuple[float, ...]
    p: float
    state: State
    rows_needed: int | None = None

    @property
    def would_decide(self) -> str:
        """`rows_needed` in words."""
        if self.rows == 1:
            return "one source decides nothing; add rows of other sources"
        return f"{_number(self.rows_needed)} would decide with a power of {POWER:.0%}"


@dataclass(frozen=True, slots=True)
class Check:
    """A measurement with its limit in the gate; None: not measured, and no limit."""

    name: str
    found: float | None
    limit: float | None

    @property
    def state(self) -> State:
        if self.limit is None:
            return "met"
        if self.found is None:
            return "undecided"
        return "met" if self.found <= self.limit else "failed"


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer, and every finding that it follows from."""

    answer: Answer
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]


# --- the file -------------------------------------------------------------------------------------


def read_gate(path: Path) -> tuple[Gate, str]:
    """Read a gate; return it with the SHA-256 of its file.

    Raises:
        ConfigError: C012, with every fault.
    """
    try:
        content = path.read_bytes()
        gate = Gate.model_validate(tomllib.loads(content.decode()))
        return gate, hashlib.sha256(content).hexdigest()
    except ValidationError as error:
        raise invalid(path, settings_faults(Gate, error)) from error
    except (OSError, ValueError, RecursionError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise invalid(path, [f"it cannot be read: {said}"]) from error


def invalid(where: object, faults: Sequence[str]) -> ConfigError:
    """Return the error for a gate that cannot be used or decided."""
    return ConfigError(
        "C012",
        "the gate cannot be used",
        where=where,
        faults=faults,
        remedy="correct the gate, its path or its suites; docs/guide/promote.md shows a gate",
    )


def foretell(gate: Gate, suite: Suite, where: object) -> list[str]:
    """Describe the power of each requirement, one line for each, before any work.

    Raises:
        ConfigError: C012, with every reason why no outcome on these rows can decide the gate.
    """
    tasks, faults = {task.id: task for task in suite.tasks}, list[str]()
    for each in gate.require:
        if each.task not in tasks:
            faults.append(f"there is no task {each.task!r}; there are {', '.join(tasks)}")
        elif (task := tasks[each.task]).scorer.binary and (each.superior or -each.bound) >= 1:
            faults.append(f"task {each.task!r}: '{each}' of scores of 0 and 1; write 0.05 for 5 %")
        elif (rows := units(task)) < (least := each.fewest(binary=_binary(gate, task))):
            what = f"{rows} rows are" if rows > 1 else "rows of one source are"
            need = f"{least} in each of {gate.parts} cycles" if gate.parts > 1 else f"{least}"
            faults.append(
                f"task {each.task!r}: {what} too few to show '{each}', which takes {need}"
            )
    sampled = {t.id for t in suite.tasks if t.scorer.asks == "answer" and t.settings().temperature}
    if gate.seeds and (fixed := sorted(tasks.keys() - sampled)):
        what = "every seed gives the same scores, as nothing is sampled: write cycles, not seeds"
        faults.append(f"tasks {', '.join(fixed)}: {what}")
    if gate.limits.seconds_per_answer and all(t.scorer.asks != "answer" for t in suite.tasks):
        faults.append("limits: seconds-per-answer, and no task has answers")
    if faults:
        raise invalid(where, faults)
    return [_foretold(gate, each, tasks[each.task]) for each in gate.require]


def _binary(gate: Gate, task: Task) -> bool:
    return task.scorer.binary and not gate.seeds and units(task) == len(task.examples)


def _foretold(gate: Gate, each: Requirement, task: Task) -> str:
    rows, fewest = units(task), each.fewest(binary=_binary(gate, task))
    least = gate.parts * fewest
    if rows < least:
        need = f"{fewest} in each of {gate.parts} cycles"
        return f"{task.id}: {rows} rows are too few to show '{each}', which takes {need}"
    if not _binary(gate, task):
        shift = statistics.visible_shift(rows, 2 * ONE_SIDED)
        return f"{task.id}: {rows} rows show {shift:.2f} standard deviations of their differences"
    power = partial(_power, each, each.planned, gate.cycles, 0.5)
    need = _number(statistics.rows_needed(power, least))
    return (
        f"{task.id}: {rows} rows show '{each}' with a power of {power(rows):.0%} if the gain is "
        f"{each.planned:g}; {POWER:.0%} takes {need}, "
        "or fewer if the answers agree more than by chance"
    )


def _power(each: Requirement, gain: float, cycles: int, discordant: float, rows: int) -> float:
    return statistics.power_of_shares(rows, gain, each.bound, cycles, discordant)


def _number(rows: int | None) -> str:
    return "more than 100,000 rows" if rows is None else f"{rows:,} rows"


# --- the decision ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Gains:
    """Differences of a task's scores, positive where the candidate is better.

    Args:
        cycles: the mean of each cycle.
        parts: number of parts that the rows are split into for the cycles.
    """

    values_N: Doubles
    weights_N: Doubles
    binary: bool
    cycles: tuple[float, ...]
    parts: int

    def above(self, bound: float) -> float:
        return above(self.values_N, self.weights_N, bound, binary=self.binary)

    def below(self, bound: float) -> float:
        return above(-self.values_N, self.weights_N, -bound, binary=self.binary)


def decide(gate: Gate, evidence: Evidence, measured: Mapping[str, float | None]) -> Decision:
    """Decide by scorecards, and by measurements under the names of the gate's limits."""
    required = {each.task: each for each in gate.require}
    findings = list[Finding]()
    for backend, (own, other) in evidence.items():
        gains = {task: _gains(gate, own, other, task) for task in own[0].tasks}
        findings += [_required(backend, each, gains[task]) for task, each in required.items()]
        findings += _guarded(backend, {id: gains[id] for id in gains if id not in required})
    measured = {**measured, **_differences(evidence)}
    limits = gate.limits.model_dump(by_alias=True)
    if gate.limits.leakage == 1:
        limits["leakage"] = None
    checks = [Check(name, value, limits[name]) for name, value in measured.items()]
    states = {*(each.state for each in findings), *(each.state for each in checks)}
    answer: Answer = "yes" if states == {"met"} else "not enough evidence"
    return Decision("no" if "failed" in states else answer, tuple(findings), tuple(checks))


def _gains(gate: Gate, own: Sequence[Scorecard], other: Sequence[Scorecard], id: str) -> _Gains:
    task = own[0].tasks[id]
    sign = 1.0 if task.higher_is_better else -1.0
    values = [sign * (a.values[id] - b.values[id]) for a, b in zip(own, other, strict=True)]
    weights, rows = [each.weights[id] for each in own], len(values[0])
    if gate.seeds:  # a row is a cluster of its scores
        names = [str(at) for at in range(rows)] * len(values)
        every = statistics.clustered(np.concatenate(values), np.concatenate(weights), names)
        return _Gains(*every, False, tuple(map(mean, values, weights)), gate.parts)
    order = sorted(range(rows), key=lambda at: hashlib.sha256(f"{id} {at}".encode()).digest())
    parts = [order[at :: gate.cycles] for at in range(gate.cycles)]
    cycles = tuple(mean(values[0][part], weights[0][part]) if part else 0.0 for part in parts)
    return _Gains(values[0], weights[0], task.binary, cycles, gate.parts)


def _required(backend: str, each: Requirement, gains: _Gains) -> Finding:
    p, least = gains.above(each.bound), gains.parts * each.fewest(binary=gains.binary)
    found = partial(_finding, backend, each.task, str(each), gains, p)
    if p <= ONE_SIDED and min(gains.cycles) > each.bound and len(gains.values_N) >= least:
        return found("met")
    if gains.below(each.superior or each.bound) <= ONE_SIDED:
        return found("failed")
    undecided = found("undecided")
    gain = max(undecided.gain, each.planned)
    return replace(undecided, rows_needed=_needed(each, gains, gain, least))


def _guarded(backend: str, tasks: Mapping[str, _Gains]) -> list[Finding]:
    p_values = [gains.below(0.0) for gains in tasks.values()]
    states: list[State] = [
        "undecided" if len(gains.values_N) == 1 else "failed" if p <= ONE_SIDED else "met"
        for gains, p in zip(tasks.values(), statistics.holm(p_values), strict=True)
    ]
    return [
        _finding(backend, task, "not worse", gains, p, state)
        for (task, gains), p, state in zip(tasks.items(), p_values, states, strict=True)
    ]


def _finding(
    backend: str, task: str, demand: str, gains: _Gains, p: float, state: State
) -> Finding:
    gain = mean(gains.values_N, gains.weights_N)
    interval = difference_interval(gains.values_N, gains.weights_N, gains.binary)
    rows, cycles = len(gains.values_N), gains.cycles
    return Finding(task, backend, demand, rows, gain, interval, cycles, p, state)


def _needed(each: Requirement, gains: _Gains, gain: float, least: int) -> int | None:
    """Return how many rows, `least` or more, show the requirement at 80 % power if the gain is
    `gain`."""
    cycles, rows = len(gains.cycles), len(gains.values_N)
    # Never 0: rows on which no model was alone right so far say little about the next.
    discordant = (np.count_nonzero(gains.values_N) + 1) / (rows + 2)
    power = partial(_power, each, gain, cycles, discordant)
    if not gains.binary:
        values = statistics.supplemented(gains.values_N) if each.bound else gains.values_N
        deviation = float(values.std(ddof=1)) if rows > 1 else 0.0
        shift = (gain - each.bound) / deviation if deviation else math.inf
        power = partial(statistics.power_of_means, shift, cycles)
    return statistics.rows_needed(power, least)


def _differences(evidence: Evidence) -> dict[str, float]:
    """Return the share of the candidate's scores that differ on any backend from the first one."""
    if len(evidence) < 2:
        return {}
    first_N, *others = (_scores(own) for own, _ in evidence.values())
    allowed_N = SAME * np.maximum(1, np.abs(first_N))
    different = [(np.abs(each_N - first_N) > allowed_N).mean() for each_N in others]
    return {DIFFERENCES: float(max(different))}


def _scores(cards: Sequence[Scorecard]) -> Doubles:
    return np.concatenate([values_N for card in cards for values_N in card.values.values()])
