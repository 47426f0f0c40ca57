"""Scorers of code, and answers that the model corrects."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vox_core.api.generating import OpenModel
from vox_core.errors import ConfigError, TrainingError
from vox_eval import Example, Output, Score, Scorer, ScorerSpec, UnusableScorer
from vox_eval.evaluation import evaluate_and_compare
from vox_eval.scorer import find_scorer, options_of
from vox_eval.settings import EvalSettings
from vox_scorers import code_scorers
from vox_scorers.sandbox import Ended, NoSandbox


@pytest.fixture(autouse=True)
def _a_sandbox(monkeypatch) -> None:
    """Where there is none, too: what is contained is in test_sandbox.py."""
    monkeypatch.setattr(code_scorers, "require_sandbox", lambda: None)


def scorer(name: str, **given: Any) -> Scorer:
    return find_scorer(ScorerSpec(name, given, Path()))[0]


def ended(monkeypatch, *expected: Ended) -> list[tuple[object, ...]]:
    """Let programs end like this; return what is run."""
    given, ends = [], iter(expected)
    run = lambda *arguments: given.append(arguments) or next(ends)  # noqa: E731
    monkeypatch.setattr(code_scorers, "run_python", run)
    return given


# --- python ---------------------------------------------------------------------------------------


def test_a_program_is_the_answers_code_with_the_rows_tests(monkeypatch) -> None:
    given = ended(monkeypatch, Ended(True, "passed"), Ended(False, "AssertionError"))
    found = scorer("python", seconds=3, memory_mib=100)
    example = Example("id", {"tests": "assert f()", "setup": "import math"})
    found.check(example)
    scores = [found.score(example, Output(f"So:\n```python\n{n}\n```", [])) for n in range(2)]
    assert scores == [Score(1, "passed"), Score(0, "AssertionError")]
    answer, tests, limits, setup = given[0]
    assert (answer, tests, setup) == ("0\n", "assert f()", "import math")
    assert (limits.seconds, limits.memory, limits.processes) == (3, 100 << 20, 8)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, 'no "tests"'),
        ({"tests": " \n"}, 'no "tests"'),
        ({"tests": ["assert f()"]}, 'no "tests"'),
        ({"tests": "assert f("}, "tests: line 1: '\\(' was never closed"),
        ({"tests": "assert f()", "setup": 1}, 'no "setup"'),
    ],
)
def test_rows_without_tests_are_refused(fields, said) -> None:
    with pytest.raises(ValueError, match=said):
        scorer("python").check(Example("id", fields))


def test_without_a_sandbox_the_suite_is_refused(monkeypatch, write, llama) -> None:
    def none() -> None:
        raise NoSandbox("it needs Linux")

    monkeypatch.setattr(code_scorers, "require_sandbox", none)
    suite = 'name = "s"\ntask = [{ id = "t", rows = "rows.jsonl", scorer = "python" }]'
    settings = EvalSettings(suite=(write("suite.toml", suite),))
    with pytest.raises(ConfigError) as caught:
        evaluate_and_compare(str(llama), settings, observe=lambda _: None)
    (fault,) = caught.value.faults
    assert fault.endswith("programs cannot be run apart from the host here: it needs Linux")


def test_a_sandbox_that_fails_later_ends_the_evaluation(monkeypatch) -> None:
    def none(*_: object) -> None:
        raise NoSandbox("no memory")

    monkeypatch.setattr(code_scorers, "run_python", none)
    with pytest.raises(TrainingError, match="cannot be run apart from the host"):
        scorer("python").score(Example("id", {"tests": "f()"}), Output("", []))


# --- syntax ---------------------------------------------------------------------------------------

NESTED = 100_000


@pytest.mark.parametrize(
    ("language", "answer", "expected"),
    [
        ("python", "x = 1", Score(1, "parsed")),
        ("python", "```python\nx = '\\d'\n```", Score(1, "parsed")),
        ("python", "Here: x = = 1", Score(0, "line 1: invalid syntax")),
        ("python", "x = '\ud800'", Score(0, "no Python: 'utf-8' codec can't encode character")),
        ("python", "-" * NESTED + "1", Score(0, "no Python: too deep")),
        ("python", "x = 1\n" * NESTED, Score(0, "more than 200,000 characters")),
        ("json", '```json\n{"a": [1]}\n```', Score(1, "parsed")),
        ("json", "[1, ]", Score(0, "no JSON: Expecting value: line 1 column 5 (char 4)")),
        ("json", "NaN", Score(0, "no JSON: NaN is no JSON")),
        ("json", "[" * NESTED, Score(0, "no JSON: maximum recursion depth exceeded")),
    ],
)
def test_what_can_be_parsed(language, answer, expected) -> None:
    found = scorer("syntax", language=language).score(Example("id", {}), Output(answer, []))
    assert found.value == expected.value
    assert found.why.startswith(expected.why)


# --- repair ---------------------------------------------------------------------------------------

SUITE = """
name = "s"
[[task]]
id = "t"
rows = "rows.jsonl"
scorer = { name = "repair", check = { name = "exact", ignore-case = true }, rounds = 2 }
sampling = { max-tokens = 4 }
"""


@pytest.fixture
def lines(write, llama):
    """`lines(out)` -> the lines and the task of an evaluation of four rows, one of them right."""

    def made(out: str) -> tuple[list[dict[str, Any]], Any]:
        settings = EvalSettings(
            suite=(write("suite.toml", SUITE),), dtype="fp32", backend="cpu", out=Path(out)
        )
        report = evaluate_and_compare(str(llama), settings, observe=lambda _: None)
        found = list(map(json.loads, Path(out, "eval.jsonl").read_text("utf-8").splitlines()))
        return found, report.own.card.tasks["t"]

    return made


def test_an_answer_that_is_not_right_goes_back_to_the_model(lines, write) -> None:
    rows = [{"prompt": f"Say {n}.", "ideal": "nothing"} for n in range(4)]
    write("rows.jsonl", *rows)
    first, task = lines("first")
    assert task.metrics == {"right at first": 0, "mean repairs": 2}
    assert [len(line["turns"]) for line in first] == [4] * 4
    rows[1]["ideal"], rows[2]["ideal"] = first[1]["turns"][0], first[2]["answer"]
    write("rows.jsonl", *rows)
    second, task = lines("second")
    # Answers that follow depend on what was said, which names the right one.
    assert second[1]["score"] == 1 and "turns" not in second[1]
    assert second[1]["answer"] == first[1]["turns"][0]
    assert task.metrics == {"right at first": 0.25, "mean repairs": 1.5}
    said = second[0]["turns"][1]
    assert said.startswith("This is not right:\n\nnot equal to 'nothing'\n\nCorrect it")
    assert task.score == 0.25


def test_an_empty_answer_goes_back_to_the_model_too(lines, write, monkeypatch) -> None:
    replies = OpenModel.replies

    def silent(model: OpenModel, questions: Any, **given: Any) -> Any:
        return ((at, replace(each, text="")) for at, each in replies(model, questions, **given))

    monkeypatch.setattr(OpenModel, "replies", silent)
    write("rows.jsonl", {"prompt": "Say 1.", "ideal": "nothing"})
    ((line,), _) = lines("out")
    assert [line["turns"][0], line["turns"][2], line["answer"]] == ["", "", ""]


def test_a_conversation_that_grows_too_long_ends(lines, write) -> None:
    """The tiny model reads 512 tokens."""
    write("rows.jsonl", {"prompt": "a" * 380, "ideal": "b" * 60})
    ((line,), _) = lines("out")
    assert (line["score"], "turns" in line) == (0, False)


def test_what_repair_asks_is_part_of_its_options() -> None:
    found = options_of(scorer("repair", check={"name": "numeric", "relative-tolerance": 0.5}))
    check = {"scorer": "Numeric", "tolerance": 0, "relative_tolerance": 0.5}
    assert found["check_with"] == check
    assert found["rounds"] == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"check": "pyton"}, "there is no scorer 'pyton'"),
        ({"check": {"name": "numeric", "tolerence": 1}}, "tolerence: unknown option"),
        ({"check": 3}, "name a scorer"),
        ({"check": "choice"}, "'choice' does not say right or wrong of an answer"),
        ({"check": "similarity"}, "'similarity' does not say right or wrong of an answer"),
        ({"check": "repair"}, "'repair' does not say right or wrong of an answer"),
        ({"check": "exact", "rounds": 0}, "rounds: input should be greater"),
    ],
)
def test_what_repair_cannot_ask(given, said) -> None:
    with pytest.raises(UnusableScorer, match=said):
        scorer("repair", **given)
