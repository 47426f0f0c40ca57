"""`vox eval RUN --harness lm-eval --tasks ...`: tasks of EleutherAI's lm-evaluation-harness.

lm-eval makes the prompts and the scores, vox computes (lm_eval_model.py). The folder is that of any
evaluation, with two files more:

    requests.jsonl    what the model gave, in blocks: where an interrupted evaluation goes on
    lm-eval.json      lm-eval's own results

The score of an example is the first of its task's metrics; the others, with their standard errors,
are figures of the task in the scorecard.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from vox_core.api.commands import named
from vox_core.api.files import storage_errors, write_bytes, write_json
from vox_core.api.generating import GenerateSettings, OpenModel, open_model
from vox_core.api.models import Observe, Progress, resolve_reference
from vox_core.errors import ConfigError
from vox_eval.evaluation import AGAINST, EVALUATIONS, Evaluated, Report, computed_in, default_folder
from vox_eval.scorecard import SAMPLES, SCORECARD, Scorecard, compare, scorecard
from vox_eval.scorer import Example, Output, Score, Scorer, options
from vox_eval.settings import EvalSettings
from vox_eval.suites import Suite, Task, TaskTable, json_digest

REQUESTS = "requests.jsonl"
RESULTS = "lm-eval.json"
BOOTSTRAPS = 1000
"""For the standard errors of metrics that are no means."""
_LENGTHS = "bits_per_byte", "byte_perplexity", "word_perplexity"


@options
class Measured(Scorer):
    """lm-eval's metric of a task.

    Args:
        metric: name of the metric.
        config: digest of the task's configuration.
    """

    metric: str
    config: str
    figures: Mapping[str, float] = Field(default_factory=dict, exclude=True)

    def score(self, example: Example, output: Output) -> Score:
        raise NotImplementedError("lm-eval scores")

    def metrics(self, outputs: Sequence[Output]) -> dict[str, float]:
        return dict(self.figures)


@options
class MeasuredMean(Measured):
    """The same, with other scores than 0 and 1."""

    binary: ClassVar[bool] = False


@options
class MeasuredBits(MeasuredMean):
    """Bits per byte of texts."""

    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = "bits per byte"


def evaluate(
    reference: str,
    tasks: Sequence[str],
    settings: EvalSettings,
    *,
    observe: Observe,
    progress: Progress | None = None,
) -> Report:
    """Evaluate what `reference` names on tasks of lm-eval, and `settings.against`, too.

    Args:
        tasks: names, or YAML files.

    Raises:
        ConfigError: C009, lm-eval is not installed; C010, it has no such task, or its data are not
            there.
        InputError, WorkError: as `vox_eval.evaluation.evaluate`.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "C009",
            "--harness lm-eval needs the package lm-eval",
            remedy='pip install "vox-ml-scorers[lm-eval]"',
        )
    loaded = _loaded(tasks)
    evaluated = partial(
        _evaluate, tasks=loaded, settings=settings, observe=observe, progress=progress
    )
    if settings.against:  # before the first model is evaluated
        resolve_reference(settings.against, progress=progress)
    own = evaluated(reference, out=settings.out)
    if settings.against is None:
        return Report(own)
    other = evaluated(settings.against, out=settings.out and settings.out / AGAINST)
    return Report(own, other, compare(own.card, other.card))


def _loaded(names: Sequence[str]) -> dict[str, Any]:
    """Return lm-eval's tasks by name, those of groups one by one."""
    from lm_eval.tasks import TaskManager

    files = [Path(name) for name in names if name.endswith((".yaml", ".yml"))]
    manager = TaskManager(
        include_path=[str(each.parent) for each in files] or None,
        include_defaults=len(files) < len(names),  # which takes long
    )
    wanted = [_task_of(Path(name)) if Path(name) in files else name for name in names]
    unknown = [name for name in wanted if name not in manager.all_tasks]
    if unknown or not wanted:
        raise _no_task(
            ", ".join(unknown) or "no task", "names of `lm-eval ls tasks`, or YAML files"
        )
    try:
        return dict(manager.load(wanted)["tasks"])
    except Exception as error:  # of datasets, yaml or the task's own code
        raise _no_task(f"{type(error).__name__}: {error}", "tasks whose data are there") from error


def _task_of(file: Path) -> str:
    """Return the name of the task in a YAML file."""
    try:
        found = re.search(r"^task:[ \t]*([\w.-]+)", file.read_text("utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError) as error:
        raise _no_task(f"{file}: {error}", "a YAML file") from error
    if found is None:
        raise _no_task(f"{file} without `task:`", "a task of lm-eval")
    return found[1]


def _no_task(found: str, expected: str) -> ConfigError:
    return ConfigError(
        "C010",
        "lm-eval cannot evaluate these tasks",
        where="--tasks",
        found=found,
        expected=expected,
        remedy="see lm-eval's documentation on tasks; nothing was evaluated",
    )


def _evaluate(
    reference: str,
    *,
    tasks: Mapping[str, Any],
    settings: EvalSettings,
    out: Path | None,
    observe: Observe,
    progress: Progress | None,
) -> Evaluated:
    from lm_eval import simple_evaluate

    from vox_scorers.lm_eval_model import BLOCK, VoxModel

    chosen = GenerateSettings(backend=settings.backend, dtype=settings.dtype)
    if out:  # before a model is loaded
        EVALUATIONS.require_same(out, {})
    with open_model(reference, chosen, observe=observe, progress=progress) as model:
        decides = _decides(model, tasks, settings.limit, BLOCK)
        digest = json_digest(decides)
        folder = out or default_folder(Suite("lm-eval", ()), reference, digest)
        with computed_in(folder, {"digest": digest, **decides}, model.title, observe):
            # Its bootstraps start processes otherwise, which take longer.
            os.environ.setdefault("DISABLE_MULTIPROC", "1")
            logging.getLogger("lm_eval").setLevel(logging.ERROR)
            greedy = frozenset(name for name, task in tasks.items() if _needs_greedy(task))
            results = simple_evaluate(
                model=VoxModel(model, folder / REQUESTS, greedy, observe),
                tasks=list(tasks.values()),
                limit=settings.limit or None,
                bootstrap_iters=BOOTSTRAPS,
            )
            card = _written(folder, results, digest, model.title)
    return Evaluated(folder, card, named(reference, model.title))


def _decides(model: OpenModel, tasks: Mapping[str, Any], limit: int, block: int) -> dict[str, Any]:
    return {
        "harness": {"lm-eval": version("lm-eval"), "limit": limit, "block": block},
        "tasks": {name: _digest(task.dump_config()) for name, task in tasks.items()},
        "model": {"identity": model.identity(), **model.computed_by},
        "version": version("vox-ml-scorers"),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _needs_greedy(task: Any) -> bool:
    return task.OUTPUT_TYPE == "loglikelihood" or "exact_match" in task.aggregation()


# --- files ----------------------------------------------------------------------------------------


def _written(folder: Path, results: Mapping[str, Any], digest: str, model: str) -> Scorecard:
    """Write lm-eval's results as an evaluation's files."""
    tasks, lines = list[Task](), list[dict[str, Any]]()
    for name, samples in results["samples"].items():
        task, own = _task(name, samples, results)
        tasks.append(task)
        lines += own
    content = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode()
    write_bytes(folder / SAMPLES, content)
    with storage_errors(folder):
        kept = {key: results[key] for key in ("results", "groups", "n-shot") if key in results}
        write_json(folder / RESULTS, json.loads(json.dumps(kept, default=str)))
    card = scorecard(Suite("lm-eval", tuple(tasks)), lines, content, digest=digest, model=model)
    write_json(folder / SCORECARD, card.to_json())
    return card


def _task(
    name: str, samples: Sequence[Mapping[str, Any]], results: Mapping[str, Any]
) -> tuple[Task, list[dict[str, Any]]]:
    """Return a task of lm-eval as one of a suite, with the lines of its examples."""
    own = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    metric = _metric(name, own[0], results["configs"][name]["metric_list"])
    lines = [_line(name, sample, metric) for sample in own]
    figures = {
        key.removesuffix(",none"): float(value)
        for key, value in results["results"][name].items()
        if isinstance(value, int | float) and math.isfinite(value) and key != "sample_len"
    }
    kind: type[Measured] = MeasuredBits if metric in _LENGTHS else MeasuredMean
    if metric not in _LENGTHS and all(line["score"] in (0, 1) for line in lines):
        kind = Measured
    scorer = kind(metric=metric, config=_digest(results["configs"][name]), figures=figures)
    table = TaskTable.model_validate({"id": name, "rows": "lm-eval", "scorer": metric})
    examples = tuple(Example(line["row"], {}) for line in lines)
    return Task(name, table, scorer, f"lm-eval {version('lm-eval')}", examples), lines


def _metric(name: str, sample: Mapping[str, Any], listed: Sequence[Mapping[str, Any]]) -> str:
    """Return the first metric with a number for each example that is better when higher, or of a
    text's length. Others, such as mcc, have the parts of a figure of all examples."""
    for each in listed:
        metric = str(each["metric"])
        number = isinstance(sample.get(metric), int | float | np.number)
        if metric in _LENGTHS or (number and each.get("higher_is_better", True)):
            return metric
    raise _no_task(
        f"{name}, whose metrics are {', '.join(str(each['metric']) for each in listed)}",
        "tasks with a score for each example that is better when higher",
    )


def _line(name: str, sample: Mapping[str, Any], metric: str) -> dict[str, Any]:
    arguments = [[str(each) for each in given] for given in _arguments(sample)]
    found, weight = sample[metric], 1.0
    score = float(found[0] if metric in _LENGTHS else found)
    if metric in _LENGTHS:  # of a text: its log-likelihood, and its length
        weight = float(len(arguments[0][0].encode()))
        score = -score / weight / math.log(2)
    answers = [each[0] for each in sample["resps"]]
    texts = isinstance(answers[0], str)
    likelihoods = [] if texts else [float(np.atleast_1d(each)[0]) for each in answers]
    return {
        "task": name,
        "row": str(sample["doc_hash"])[:16],
        "prompt": arguments[0][0],
        "answer": answers[0] if texts else "",
        "log_probs": [[value] for value in likelihoods],
        "score": score,
        "weight": weight,
        "why": f"{metric} of {sample['target']!r}"[:200],
    }


def _arguments(sample: Mapping[str, Any]) -> list[Sequence[Any]]:
    given = sample["arguments"]
    return list(given.values() if isinstance(given, Mapping) else given)
