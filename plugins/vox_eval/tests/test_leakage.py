"""Rows of a suite among a run's training rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from vox_core.errors import ConfigError
from vox_eval.leakage import Leakage, find_leakage
from vox_eval.suites import read_suites

LONG = "A farmer has {} sheep and buys {} more at the market on Monday; how many has he now?"


@pytest.fixture
def leaks(write, tmp_path: Path):
    """`leaks(training rows, questions)` -> what of the questions has leaked."""

    def found(trained: list[Any], questions: list[str], **settings: Any) -> Leakage:
        data = write("train.jsonl", *trained)
        run_of(tmp_path / "run", data, **settings)
        write("rows.jsonl", *({"prompt": each, "ideal": "x"} for each in questions))
        suite = 'name = "s"\ntask = [{ id = "t", rows = "rows.jsonl", scorer = "exact" }]'
        return find_leakage(str(tmp_path / "run"), read_suites([write("suite.toml", suite)]))

    return found


def run_of(folder: Path, data: Path, **settings: Any) -> None:
    """A run folder, as far as leakage reads it."""
    folder.mkdir(exist_ok=True)
    sha256 = hashlib.sha256(data.read_bytes()).hexdigest()
    plan = {
        "settings": {"data": [str(data)], **settings},
        "sources": {"data": [{"path": str(data), "sha256": sha256}]},
    }
    (folder / "plan.json").write_text(json.dumps(plan))


def pair(question: str) -> dict[str, str]:
    return {"prompt": question, "completion": "Yes"}


def test_the_same_question_has_leaked_whatever_its_form_and_answer(leaks, tmp_path) -> None:
    turns = [{"role": "user", "content": "Who  is\nTHERE?"}, {"role": "assistant", "content": "I"}]
    found = leaks([pair("Hello you?"), {"messages": turns}], ["who is there?", "Where am I?"])
    (leak,) = found.leaks
    assert (leak.task, leak.similarity, found.trained, found.rows) == ("t", 1, 2, 2)
    assert leak.place == f"{tmp_path / 'train.jsonl'}:2"
    assert [Path(path).name for path, _ in found.files] == ["train.jsonl"]


def test_nearly_the_same_question_has_leaked(leaks) -> None:
    text = "The quick brown fox jumps over the lazy dog while the cat sleeps on the warm mat"
    near = text.replace("warm", "old")  # 3 of 16 sequences of each differ: 13 / 19
    nearer = text + " today"  # one more sequence: 15 / 16
    assert not leaks([pair(near)], [text, "Another one"]).leaks
    (leak,) = leaks([pair(nearer)], [text, "Another one"]).leaks
    assert leak.similarity == pytest.approx(15 / 16)


@pytest.mark.parametrize("turns", [["{}", "Yes", "Thanks a lot", "Welcome"], ["Hi", "Hello", "{}"]])
def test_a_question_of_any_turn_has_leaked(leaks, turns) -> None:
    roles = ("user", "assistant")
    said = [turn.format(LONG.format(3, 4)) for turn in [*turns, *["Seven"] * (len(turns) % 2)]]
    messages = [{"role": roles[at % 2], "content": each} for at, each in enumerate(said)]
    (leak,) = leaks([{"messages": messages}], [LONG.format(3, 4), "Where am I?"]).leaks
    assert leak.similarity == 1


def test_an_answer_is_no_question(leaks) -> None:
    """A greeting of the assistant, or an answer of one word."""
    for said in ("How can I help you today?", "Paris"):
        row = {"prompt": "Hello there, what is the capital of France?", "completion": said}
        assert not leaks([row], [said, "Where am I?"]).leaks


@pytest.mark.parametrize(
    "text", ["挪威王国的首都是哪一座城市它位于哪里", "ノルウェーの首都はどの都市ですか"]
)
def test_nearly_the_same_question_in_a_script_without_spaces(leaks, text) -> None:
    (leak,) = leaks([pair(text + "?")], [text, "今天的天气怎么样"]).leaks
    assert 0.8 < leak.similarity < 1


def test_a_common_instruction_is_no_leak(leaks) -> None:
    trained = [pair(LONG.format(n, 100 + n)) for n in range(30)]
    questions = [LONG.format(n, 300 + n) for n in range(30)]
    assert not leaks(trained, questions).leaks
    (leak,) = leaks([*trained, pair(questions[7])], questions).leaks
    assert leak.similarity == 1


def test_rows_that_were_not_trained_on_are_no_leak(leaks) -> None:
    rows = [{**pair("Bad one?"), "rating": 1}, {**pair("Good one?"), "rating": 5}]
    (leak,) = leaks(rows, ["Bad one?", "Good one?"], min_rating=3).leaks
    assert leak.place.endswith(":2")


def test_rows_of_the_run_before_count(leaks, tmp_path, write) -> None:
    run_of(tmp_path / "before", write("old.jsonl", pair("Old one?")))
    (leak,) = leaks([pair("New one?")], ["Old one?"], adapter=str(tmp_path / "before")).leaks
    assert leak.place.endswith("old.jsonl:1")


def test_rows_of_a_run_whose_model_is_the_base_count(leaks, tmp_path, write) -> None:
    run_of(tmp_path / "whole", write("old.jsonl", pair("Old one?")))
    (tmp_path / "whole/model").mkdir()
    for base in ("whole", "whole/model"):
        found = leaks([pair("New one?")], ["Old one?"], model=str(tmp_path / base))
        assert [leak.place for leak in found.leaks] == [f"{tmp_path / 'old.jsonl'}:1"]
        assert found.share(0.0) == 1
    assert not leaks([pair("New one?")], ["Old one?"], model="smollm2-135m").unknown


@pytest.mark.parametrize("kind", ["adapter of another tool", "merged", "relative", "inside"])
def test_a_model_without_a_record_is_not_known_to_be_without_leakage(leaks, tmp_path, kind) -> None:
    """Anywhere in the chain; what leaked in the rest of it counts."""
    other = tmp_path / "other"
    (other / "adapter").mkdir(parents=True)
    settings = {"adapter": str(other)}
    if kind == "merged":
        (other / "vox_merge.json").write_text("{}")
        settings = {"model": str(other)}
    elif kind == "relative":
        settings = {"adapter": "nowhere/other"}
    elif kind == "inside":
        settings = {"adapter": str(other / "adapter")}
    found = leaks([pair("New one?")], ["Old one?"], **settings)
    assert (found.trained, found.unknown) == (1, tuple(settings.values()))
    assert (found.share(0.0), found.leaks) == (None, ())
    leaked = leaks([pair("Old one?")], ["Old one?"], **settings)
    assert (leaked.share(0.5), leaked.share(1.0)) == (1, None)


def test_a_model_without_a_run_has_no_record(leaks, suite) -> None:
    found = find_leakage("smollm2-135m", read_suites([suite]))
    assert (found.trained, found.rows, found.leaks) == (0, 15, ())
    assert (found.unknown, found.share(0.0)) == (("smollm2-135m",), None)


@pytest.mark.parametrize("gone", [True, False])
def test_training_rows_that_are_not_there_any_more(leaks, tmp_path, gone) -> None:
    leaks([pair("Who?")], ["Where?"])
    data = tmp_path / "train.jsonl"
    data.unlink() if gone else data.write_text(json.dumps(pair("Else?")))
    with pytest.raises(ConfigError, match="cannot be compared") as caught:
        find_leakage(str(tmp_path / "run"), read_suites([tmp_path / "suite.toml"]))
    assert caught.value.code == "VOX-C012"
    assert str(data) in str(caught.value.found)
    assert gone or "changed since then" in str(caught.value.found)
