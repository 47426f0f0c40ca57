"""`vox eval`: what is printed, with which exit code, and what --json has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FLAGS = ("--dtype", "fp32", "--backend", "cpu")


def test_an_evaluation_is_printed(vox, suite, llama) -> None:
    done = vox("eval", llama, "--suite", suite, *FLAGS)
    assert done.code == 0
    head, *tasks, score, card = done.out.splitlines()
    assert head.split("  ")[0] == "task"
    assert [line.split()[:2] for line in tasks] == [
        ["say", "5"],
        ["warm", "5"],
        ["pick", "3"],
        ["text", "2"],
    ]
    assert "perplexity" in tasks[-1]
    assert score.startswith("suite score 0.")
    assert Path(card.split()[1]).parents[1] == Path("evals")
    assert "15/15 examples, 0:00 left" in done.err


def test_a_comparison_is_printed(vox, suite, llama, other_llama) -> None:
    done = vox("eval", llama, "--suite", suite, "--against", other_llama, "--out", "here", *FLAGS)
    assert done.code == 0
    assert "say: too few rows (5) to show any difference" in done.err
    head, *tasks, note, own, theirs, card = done.out.splitlines()
    assert head.split() == ["task", "score", "against", "difference", "p", "verdict"]
    assert all(line.endswith("no difference shown") for line in tasks)
    assert note == "intervals at 95 %; p-values are two-sided, adjusted by Holm's method"
    assert own.endswith(f"{llama.name}  here")
    assert theirs.endswith(f"{other_llama.name}  here/against")
    assert card == "scorecard  here/scorecard.html   answers  here/eval.jsonl"


def test_json(vox, suite, llama) -> None:
    words = ("eval", llama, "--suite", suite, "--out", "here", "--json", *FLAGS)
    found = json.loads(vox(*words).out)
    card = json.loads(Path("here/scorecard.json").read_text())
    assert found == {"folder": "here", **card}
    compared = json.loads(vox(*words, "--against", "here").out)
    assert compared["against"] == found
    assert {each["difference"] for each in compared["comparison"].values()} == {0}
    assert {each["adjusted"] for each in compared["comparison"].values()} == {1}


def test_settings_come_from_vox_toml(vox, suite, llama) -> None:
    Path("vox.toml").write_text(f'[eval]\nsuite = "{suite.name}"\nlimit = 1\nout = "here"\n')
    assert vox("eval", llama, *FLAGS).code == 0
    assert len(Path("here/eval.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), "C004"),
        (("--suite", "none.toml"), "C010"),
        (("--suite", "suite.toml", "--limit", "-1"), "C002"),
        (("--suite", "suite.toml", "--against", "here"), "C011"),
    ],
)
def test_bad_input_is_an_error_before_any_work(vox, suite, llama, words, code) -> None:
    Path("here").mkdir()
    Path("here/evaluation.json").write_text("{}")
    done = vox("eval", llama, *words, *FLAGS)
    assert done.code == 2
    assert f"error[VOX-{code}]" in done.err
    assert not Path("evals").exists()
