"""`vox eval`: what is printed, with which exit code, and what --json has."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from vox_core.api.models import write_adapter
from vox_eval import evaluation
from vox_testing import jobs

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
    assert re.search(r"  \d+\.\d{4} bits per byte  .*  perplexity \d", tasks[-1])
    assert not any("bits" in line for line in tasks[:-1])
    assert score.startswith("suite score 0.")
    assert Path(card.split()[1]).parents[1] == Path("evals")
    assert "15/15 examples, 0:00 left" in done.err


def test_rows_are_in_a_suite(vox) -> None:
    done = vox("eval", "m", "--data", "d.jsonl")
    assert done.code == 2 and "did you mean --suite? (heldout has the run's" in done.err


def test_a_comparison_is_printed(vox, suite, llama, other_llama) -> None:
    done = vox("eval", llama, "--suite", suite, "--against", other_llama, "--out", "here", *FLAGS)
    assert done.code == 0
    assert "say: too few rows (5) to show any difference" in done.err
    head, *tasks, note, own, theirs, card = done.out.splitlines()
    assert tasks[-1].count(" bits per byte (") == 2
    assert "bits per byte (" in Path("here/scorecard.html").read_text("utf-8")
    assert head.split() == ["task", "score", "against", "difference", "p", "verdict"]
    assert all(line.endswith("no difference shown") for line in tasks)
    assert note == "intervals at 95 %; p-values are two-sided, adjusted by Holm's method"
    assert own.endswith(f"{llama.name}  here")
    assert theirs.endswith(f"{other_llama.name}  here/against")
    assert card == "scorecard  here/scorecard.html   answers  here/eval.jsonl"


def test_runs_are_named_by_their_folders(vox, suite, llama) -> None:
    """Not by their base, which two runs share; scorecards of the same model stay the same."""
    words = ("--suite", suite, "--limit", 1, *FLAGS)
    state = jobs.stirred(jobs.start(llama, jobs.plan(llama, rank=4)), 0.3).adapter
    Path("mine").mkdir()
    write_adapter(Path("mine"), state, base=str(llama), modules={})
    done = vox("eval", "mine", *words, "--against", llama, "--out", "here")
    assert "  mine (base + adapter)  here" in done.out
    page = Path("here/scorecard.html").read_text("utf-8")
    assert f"tiny: mine (base + adapter) against {llama}" in page
    copy = shutil.copytree("mine", "copy")
    assert vox("eval", copy, *words, "--out", "there").code == 0
    for name in ("evaluation.json", "scorecard.json", "eval.jsonl"):
        assert Path("here", name).read_bytes() == Path("there", name).read_bytes(), name


def test_an_evaluation_is_found_under_another_name_of_its_model(vox, suite, llama) -> None:
    words = ("--suite", suite, "--limit", 1, *FLAGS)
    done = vox("eval", llama, *words)
    copy = shutil.copytree(llama, "copy")
    again = vox("eval", copy, *words)
    assert again.out.splitlines()[-1] == done.out.splitlines()[-1]
    assert len([*Path("evals").iterdir()]) == 1


def test_the_other_model_is_found_before_the_first_is_evaluated(vox, suite, llama) -> None:
    done = vox("eval", llama, "--suite", suite, "--against", "nope", *FLAGS)
    assert (done.code, "VOX-M001" in done.err, Path("evals").exists()) == (2, True, False)


def test_a_stopped_evaluation_says_what_it_keeps(vox, suite, llama, monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "BLOCK", 4)
    scored, blocks = evaluation._scored, []

    def stopped(*given: Any) -> Any:
        blocks.append(given)
        if len(blocks) == 2:
            raise KeyboardInterrupt
        return scored(*given)

    monkeypatch.setattr(evaluation, "_scored", stopped)
    words = ("eval", llama, "--suite", suite, "--out", "here", *FLAGS)
    done = vox(*words)
    assert done.code == 130
    assert done.err.splitlines()[-2:] == [
        "stopped; 4/15 examples are kept in here",
        f"next: vox {' '.join(map(str, words))}",
    ]
    assert vox(*words).code == 0


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
