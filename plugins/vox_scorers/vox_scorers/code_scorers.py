"""Scorers of code, and the one that lets a model correct itself.

python  the answer's code passes the tests of its row, apart from the host (sandbox.py)
syntax  the answer's code is Python, or JSON
repair  another scorer, whose objections go back to the model
"""

from __future__ import annotations

import ast
import platform
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, InstanceOf, PlainSerializer

from vox_core.errors import TrainingError
from vox_eval.scorer import (
    Example,
    Output,
    Score,
    Scorer,
    ScorerSpec,
    UnusableScorer,
    find_scorer,
    hookimpl,
    options,
    options_of,
)
from vox_scorers.json_schema import parse_json
from vox_scorers.sandbox import Ended, Limits, NoSandbox, code_of, require_sandbox, run_python

LONGEST = 200_000
"""Characters of code that are parsed."""
_SHOWN = 200


@options
class Python(Scorer):
    """The answer's code passes the row's `tests`, Python that raises if the answer is wrong. The
    row's `setup` runs before both.

    Args:
        seconds: for setup, answer and tests of a row together.
        memory_mib: of each process.
        processes: at once, threads included.
        python: version that answers run on.
    """

    parallel: ClassVar[int] = 2
    seconds: float = Field(10.0, gt=0, le=600)
    memory_mib: int = Field(512, ge=64)
    processes: int = Field(8, ge=1, le=256)
    python: str = Field(default_factory=platform.python_version, init=False)

    def check(self, example: Example) -> None:
        for name, least in (("tests", 1), ("setup", 0)):
            code = example.fields.get(name, "")
            if not isinstance(code, str) or len(code.strip()) < least:
                raise ValueError(f'no "{name}" in Python')
            if fault := python_fault(code):
                raise ValueError(f"{name}: {fault}")

    def score(self, example: Example, output: Output) -> Score:
        fields = example.fields
        ended = self._run(code_of(output.text), fields["tests"], fields.get("setup", ""))
        return Score(float(ended.passed), ended.why)

    def _run(self, answer: str, tests: str, setup: str) -> Ended:
        limits = Limits(self.seconds, self.memory_mib << 20, self.processes)
        try:
            return run_python(answer, tests, limits, setup)
        except NoSandbox as error:
            raise TrainingError(
                "T004",
                "a program cannot be run apart from the host",
                found=error,
                remedy="free memory or processes, and run the same command again",
            ) from error


@options
class Syntax(Scorer):
    """The answer's code, its first fenced block or all of it, can be parsed.

    Args:
        language: `python` or `json`.
    """

    language: Literal["python", "json"] = "python"

    def score(self, example: Example, output: Output) -> Score:
        code = code_of(output.text)
        fault = (python_fault if self.language == "python" else _json_fault)(code)
        return Score(float(not fault), fault[:_SHOWN] or "parsed")


def python_fault(code: str) -> str:
    """Return what keeps a text from being Python; empty if nothing does."""
    if len(code) > LONGEST:
        return f"more than {LONGEST:,} characters"
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(code)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, MemoryError, RecursionError) as error:
        return f"no Python: {error}" if str(error) else "no Python: too deep"
    return ""


def _json_fault(code: str) -> str:
    try:
        parse_json(code)
    except ValueError as error:
        return str(error)
    return ""


# --- repair ---------------------------------------------------------------------------------------


def _named(scorer: Scorer) -> dict[str, Any]:
    return {"scorer": type(scorer).__name__, **options_of(scorer)}


@options
class Repair(Scorer):
    """An answer that `check` refuses goes back to the model with the scorer's words, until it is
    right or `rounds` are over. The last answer counts.

    Args:
        check: scorer of answers.
        rounds: most answers after the first.
        message: what the model reads; `{why}` stands for the scorer's words.
    """

    parallel: ClassVar[int] = Python.parallel
    check_with: Annotated[InstanceOf[Scorer], PlainSerializer(_named)]
    check_package: str
    rounds: int = Field(2, ge=1, le=16)
    message: str = "This is not right:\n\n{why}\n\nCorrect it, and give the whole answer again."

    def check(self, example: Example) -> None:
        self.check_with.check(example)

    def score(self, example: Example, output: Output) -> Score:
        return self.check_with.score(example, output)

    def again(self, example: Example, output: Output, score: Score) -> str | None:
        if score.value == 1 or len(output.turns) >= 2 * self.rounds:
            return None
        return self.message.replace("{why}", score.why)

    def metrics(self, outputs: Sequence[Output]) -> dict[str, float]:
        counts = [len(each.turns) // 2 for each in outputs]
        first = sum(count == 0 for count in counts) / len(counts)
        return {"right at first": first, "mean repairs": sum(counts) / len(counts)}


# --- hook -----------------------------------------------------------------------------------------

_KINDS: dict[str, type[Scorer]] = {"python": Python, "syntax": Syntax, "repair": Repair}


@hookimpl
def vox_scorer(spec: ScorerSpec) -> Scorer:
    """Return a scorer of this module."""
    given = dict(spec.options)
    if spec.name == "python":
        try:
            require_sandbox()
        except NoSandbox as error:
            raise UnusableScorer(
                f"scorer 'python': programs cannot be run apart from the host here: {error}"
            ) from error
    if spec.name == "repair":
        inner = _inner(given.pop("check", "python"), spec)
        given["check_with"], given["check_package"] = inner
    return _KINDS[spec.name](**given)


def _inner(named: object, spec: ScorerSpec) -> tuple[Scorer, str]:
    """Return the scorer that `repair` asks, and its package."""
    table = {"name": named} if isinstance(named, str) else named
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise UnusableScorer("scorer 'repair': check: name a scorer, or a table with its name")
    scorer, package = find_scorer(ScorerSpec.of(table, spec.folder))
    if scorer.asks != "answer" or not scorer.binary or isinstance(scorer, Repair):
        raise UnusableScorer(
            f"scorer 'repair': check: {table['name']!r} does not say right or wrong of an answer"
        )
    return scorer, package
