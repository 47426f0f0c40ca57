"""Scorecards of evaluations, and the comparison of two on the same examples.

A task's score is the mean of its examples' scores with a 95 % interval: Wilson's for scores of 0
and 1, else by bootstrap. Examples of one `source` are not independent: intervals and tests then
resample sources. A suite's score is the mean of its tasks' by their weights, without those
whose scores are better when lower, such as bits per byte.

Two models are compared example by example. McNemar's exact test decides where scores are 0 and 1,
else a permutation test, with p-values adjusted by Holm's method over the tasks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from vox_core.api.files import read_json
from vox_core.api.host import foreign_errors
from vox_core.errors import ConfigError
from vox_eval.scorer import Output
from vox_eval.statistics import (
    LEVEL,
    POWER,
    Doubles,
    Interval,
    bootstrap,
    clustered,
    holm,
    mcnemar,
    mean,
    paired_share,
    permutation,
    visible_share,
    visible_shift,
    wilson,
)
from vox_eval.suites import Suite, Task, json_digest

EVALUATION = "evaluation.json"
SAMPLES = "eval.jsonl"
SCORECARD = "scorecard.json"
FORMAT = 1

Verdict: TypeAlias = Literal["better", "worse", "no difference shown"]


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The score of a task.

    Args:
        binary: every value has 0 or 1: of an example, and of no cluster of several.
        interval: of the score, at 95 %; None if its rows are of a single source.
        metrics: more figures of the scorer.
    """

    scorer: str
    examples: int
    score: float
    interval: Interval | None
    binary: bool
    higher_is_better: bool
    weight: float
    metrics: Mapping[str, float]
    unit: str = ""

    @property
    def shown(self) -> str:
        """The score with its unit."""
        return f"{self.score:.4f} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The scores of a model.

    Args:
        score: of the suite; None if no task has a score that is better when higher.
        suite_digest: of tasks and examples; equal in scorecards that can be compared.
        digest: of everything that decides the scores.
        samples_digest: SHA-256 of eval.jsonl.
        values, weights: of each task's examples, or of their clusters, in order; not part of
            scorecard.json.
    """

    model: str
    suite: str
    score: float | None
    tasks: Mapping[str, TaskScore]
    suite_digest: str
    digest: str
    samples_digest: str
    values: Mapping[str, Doubles]
    weights: Mapping[str, Doubles]

    def to_json(self) -> dict[str, Any]:
        """Return the content of scorecard.json."""
        facts = asdict(self)
        del facts["values"], facts["weights"]
        return {"format": FORMAT, **facts}


def scorecard(
    suite: Suite, lines: Sequence[Mapping[str, Any]], samples: bytes, *, digest: str, model: str
) -> Scorecard:
    """Return the scorecard of the lines of an eval.jsonl.

    Args:
        samples: the file's content.
    """
    own = {task.id: [line for line in lines if line["task"] == task.id] for task in suite.tasks}
    values, weights = values_of(own)
    tasks = {
        task.id: _task_score(task, own[task.id], values[task.id], weights[task.id])
        for task in suite.tasks
    }
    return Scorecard(
        model,
        suite.name,
        _suite_score([each for each in tasks.values() if each.higher_is_better]),
        tasks,
        suite.digest,
        digest,
        hashlib.sha256(samples).hexdigest(),
        values,
        weights,
    )


def _suite_score(tasks: Sequence[TaskScore]) -> float | None:
    if not tasks:
        return None
    scores, weights = [each.score for each in tasks], [each.weight for each in tasks]
    return mean(np.array(scores), np.array(weights))


def _task_score(
    task: Task, lines: Sequence[Mapping[str, Any]], values_N: Doubles, weights_N: Doubles
) -> TaskScore:
    scorer = task.scorer
    binary = scorer.binary and len(values_N) == len(lines)
    outputs = [
        Output(
            line["answer"],
            [np.asarray(each, np.float32) for each in line["log_probs"]],
            tuple(line.get("turns", ())),
        )
        for line in lines
    ]
    with foreign_errors(task.table.scorer.name, "metrics", "scorer"):
        metrics = scorer.metrics(outputs)
    return TaskScore(
        task.table.scorer.name,
        len(lines),
        mean(values_N, weights_N),
        _interval(values_N, weights_N, binary),
        binary,
        scorer.higher_is_better,
        task.table.weight,
        metrics,
        scorer.unit,
    )


def _interval(values_N: Doubles, weights_N: Doubles, binary: bool) -> Interval | None:
    if binary:
        return wilson(int(values_N.sum()), len(values_N))
    return bootstrap(values_N, weights_N)


def values_of(
    lines: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[dict[str, Doubles], dict[str, Doubles]]:
    """Return values and weights of each task's lines, or of their clusters."""
    pairs = {
        id: clustered(_numbers(own, "score"), _numbers(own, "weight"), list(map(source_of, own)))
        for id, own in lines.items()
    }
    return {id: pair[0] for id, pair in pairs.items()}, {id: pair[1] for id, pair in pairs.items()}


def source_of(row: Mapping[str, Any]) -> str | None:
    """Return the source that a row names."""
    return None if row.get("source") in (None, "") else str(row["source"])


def units(task: Task) -> int:
    """Return how many sources the rows of a task have; a row without one is its own."""
    sources = [source_of(example.fields) for example in task.examples]
    return sources.count(None) + len({*sources} - {None})


def _numbers(lines: Sequence[Mapping[str, Any]], key: str) -> Doubles:
    return np.array([line[key] for line in lines], np.float64)


# --- an earlier evaluation ------------------------------------------------------------------------


def read_scorecard(folder: Path, suite: Suite) -> Scorecard:
    """Read the scorecard of an earlier evaluation of the same suite.

    Raises:
        ConfigError: C011, it is unfinished, or of another suite, or its files changed.
    """
    try:
        card, samples = read_json(folder / SCORECARD), (folder / SAMPLES).read_bytes()
        found = card["suite_digest"], card["samples_digest"]
        digest, model = str(card["digest"]), str(card["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _incomparable(folder, f"files that cannot be read: {error}") from error
    if found[0] != suite.digest:
        raise _incomparable(folder, "other tasks, rows, scorers, sampling or --limit")
    if found[1] != hashlib.sha256(samples).hexdigest():
        raise _incomparable(folder, f"a {SAMPLES} that changed after {SCORECARD} was written")
    lines = [json.loads(line) for line in samples.splitlines()]
    return scorecard(suite, lines, samples, digest=digest, model=model)


def stored_scorecard(folder: Path) -> Scorecard:
    """Read the scorecard of an evaluation, without its suite.

    Raises:
        ValueError: its files do not belong together.
        TypeError, KeyError: they are not those of an evaluation.
    """
    card, evaluation = read_json(folder / SCORECARD), read_json(folder / EVALUATION)
    samples = (folder / SAMPLES).read_bytes()
    decides = {key: value for key, value in evaluation.items() if key not in ("format", "digest")}
    said = card["digest"], card["suite_digest"], card["samples_digest"]
    found = json_digest(decides), json_digest(decides["suite"]["tasks"])
    if said != (*found, hashlib.sha256(samples).hexdigest()):
        raise ValueError(f"{folder.name}: the scorecard is of another suite, or other samples")
    lines = [json.loads(line) for line in samples.splitlines()]
    tasks = {id: TaskScore(**each) for id, each in card["tasks"].items()}
    values, weights = values_of(
        {id: [line for line in lines if line["task"] == id] for id in tasks}
    )
    if not all(alike(mean(values[id], weights[id]), each.score) for id, each in tasks.items()):
        raise ValueError(f"{folder.name}: the scorecard has other scores than its samples")
    del card["format"], card["tasks"]
    return Scorecard(tasks=tasks, values=values, weights=weights, **card)


def alike(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal up to roundoff: processors add in other orders."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    lists = isinstance(a, list) and isinstance(b, list)
    return len(a) == len(b) and all(map(alike, a, b)) if lists else bool(a == b)


def _incomparable(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        "C011",
        "the earlier evaluation cannot be compared",
        where=f"--against {folder}",
        found=found,
        expected="a finished evaluation of the same suite",
        remedy="name its model instead of the folder, and it is evaluated, too",
    )


# --- comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """Two models on one task.

    Args:
        difference: score of the first less that of the second, with its interval at 95 %.
        p: of the test, unadjusted.
        adjusted: by Holm's method over the tasks.
        verdict: on the first model, at 5 %.
    """

    first: TaskScore
    second: TaskScore
    difference: float
    interval: Interval | None
    p: float
    adjusted: float
    verdict: Verdict


def compare(first: Scorecard, second: Scorecard) -> dict[str, TaskComparison]:
    """Compare two models task by task."""
    p_values = [_p_value(first, second, id) for id in first.tasks]
    adjusted = holm(p_values)
    found = {}
    for id, p, holm_p in zip(first.tasks, p_values, adjusted, strict=True):
        weights_N = first.weights[id]
        differences_N = first.values[id] - second.values[id]
        difference = mean(differences_N, weights_N)
        found[id] = TaskComparison(
            first.tasks[id],
            second.tasks[id],
            difference,
            difference_interval(differences_N, weights_N, first.tasks[id].binary),
            p,
            holm_p,
            _verdict(difference, holm_p, first.tasks[id].higher_is_better),
        )
    return found


def difference_interval(
    differences_N: Doubles, weights_N: Doubles, binary: bool
) -> Interval | None:
    """Return the 95 % interval of a mean paired difference; None of a single source."""
    if binary:
        wins, losses = int((differences_N > 0).sum()), int((differences_N < 0).sum())
        return paired_share(wins, losses, len(differences_N))
    return bootstrap(differences_N, weights_N)


def _p_value(first: Scorecard, second: Scorecard, id: str) -> float:
    differences_N = first.values[id] - second.values[id]
    if first.tasks[id].binary:
        return mcnemar(int((differences_N > 0).sum()), int((differences_N < 0).sum()))
    return permutation(first.weights[id] * differences_N)


def _verdict(difference: float, p: float, higher_is_better: bool) -> Verdict:
    if p > 1 - LEVEL:
        return "no difference shown"
    return "better" if (difference > 0) == higher_is_better else "worse"


def visible(suite: Suite) -> list[str]:
    """Describe the smallest difference that each task can show, one line for each.

    Each p-value has to be significant as Holm's smallest of all tasks, so that a difference in one
    task alone is enough.
    """
    alpha = (1 - LEVEL) / len(suite.tasks)
    return [f"{task.id}: {_visible(task, alpha)}" for task in suite.tasks]


def _visible(task: Task, alpha: float) -> str:
    count = units(task)
    rows = "rows" if count == len(task.examples) else "sources"
    binary = task.scorer.binary and rows == "rows"
    least = (visible_share if binary else visible_shift)(count, alpha)
    if least is None:
        return f"too few {rows} ({count}) to show any difference"
    shown = f"{count} {rows} show, at {POWER:.0%} power, a mean difference of "
    if binary:
        return f"{shown}{100 * least:.1f} points, or less if the answers agree more than by chance"
    return f"{shown}{least:.2f} standard deviations of the differences"
