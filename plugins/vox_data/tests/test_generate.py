"""`vox data generate` with a tiny teacher: what is kept, why not, and going on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vox_core.errors import ConfigError, VoxError
from vox_data import generate as module
from vox_data.generate import Generated, generate, prompts_of
from vox_data.generate_recipe import GenerateRecipe, read_recipe
from vox_testing.llama import write_llama

RECIPE = """
template = ["Say {word} in {count} words.", "{word}?"]
seeds = "seeds.jsonl"
near = 0
[values]
count = [1, 2, 3]
[sampling]
max-tokens = 40
temperature = 1
stop = ["a", "e", "i", "o", "u", "1", "2", "3", "4"]
"""
FILES = ("generation.json", "answers.jsonl", "train.jsonl", "rejected.jsonl", "report.json")


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "BLOCK", 4)
    Path("recipe.toml").write_text(RECIPE)
    words = ("sun", "moon")
    Path("seeds.jsonl").write_text("\n".join(json.dumps({"word": w, "ideal": w}) for w in words))


def made(teacher: Path | str, out: str = "out", observe: Any = lambda _: None) -> Generated:
    given: dict[str, Any] = {"backend": "cpu", "dtype": "fp32", "observe": observe}
    return generate(str(teacher), Path("recipe.toml"), Path(out), **given)


def rows(name: str, out: str = "out") -> list[dict[str, Any]]:
    return list(map(json.loads, Path(out, name).read_text("utf-8").splitlines()))


def files_of(out: str) -> dict[str, bytes]:
    return {name: Path(out, name).read_bytes() for name in FILES}


# --- prompts --------------------------------------------------------------------------------------


def test_prompts_are_templates_with_every_row_and_value() -> None:
    recipe = read_recipe(Path("recipe.toml"))
    prompts = [each["prompt"] for each in prompts_of(recipe, [{"word": "sun"}, {"word": "moon"}])]
    assert len(prompts) == 12
    assert {"Say sun in 3 words.", "moon?"} <= {*prompts}
    again = recipe.model_copy(update={"seed": 1, "rows": 5})
    assert [each["prompt"] for each in prompts_of(again, [{"word": "sun"}])] != prompts[:5]
    assert len(prompts_of(again, [{"word": "sun"}])) == 5


def test_a_value_is_no_template() -> None:
    recipe = GenerateRecipe(template=("{a}",), values={"a": ("{b}",), "b": (1,)})
    assert prompts_of(recipe, [{}])[0]["prompt"] == "{b}"


# --- rows -----------------------------------------------------------------------------------------


def test_rows_are_what_training_reads(teacher) -> None:
    from vox_core.api.rows import read_row

    report = made(teacher)
    kept = rows("train.jsonl")
    assert (report.prompts, report.kept) == (12, len(kept)) and kept
    for row in kept:
        read_row(json.dumps(row).encode())
        assert row["provenance"]["teacher"] == str(teacher)
    answered = rows("answers.jsonl")
    assert [line["answer"] for line in answered if "rejected" not in line]
    numbers = [row["provenance"]["number"] for row in kept + rows("rejected.jsonl")]
    assert sorted(numbers) == list(range(12))


def test_the_command_says_what_was_kept_and_what_comes_next(vox, teacher) -> None:
    given = ("--from", teacher, "--recipe", "recipe.toml", "--out", "o ut", "--backend", "cpu")
    done = vox("data", "generate", *given, "--dtype", "fp32")
    kept = len(rows("train.jsonl", "o ut"))
    assert done.out.startswith(f"{kept} of 12 rows kept\n")
    assert done.out.endswith("\nnext: vox train --data 'o ut/train.jsonl'\n")
    told = json.loads(vox("data", "generate", *given, "--dtype", "fp32", "--json").out)
    assert (told["folder"], told["prompts"], told["kept"]) == ("o ut", 12, kept)
    assert kept + sum(told["rejected"].values()) == 12


class Fixed:
    """A judge that goes by the row alone."""

    def __init__(self, identity: dict[str, Any], score: Any, fault: str = "") -> None:
        self.identity, self.score, self.fault = identity, score, fault

    def check(self, row: Any) -> None:
        if self.fault:
            raise ConfigError("C010", self.fault, remedy="give it")

    def __call__(self, row: Any, answer: str) -> tuple[float, str]:
        return self.score(row)


def test_a_prompt_that_cannot_be_judged_is_refused_before_any_work(monkeypatch) -> None:
    with Path("recipe.toml").open("a") as file:
        file.write('[[check]]\nscorer = "c"\n')
    judge = Fixed({}, None, "no ideal")
    monkeypatch.setattr(module, "_provided", lambda *_: lambda *_: judge)
    with pytest.raises(ConfigError, match="no ideal"):
        made("no model")
    assert not Path("out").exists()


def test_another_scorer_is_another_generation(teacher, monkeypatch) -> None:
    with Path("recipe.toml").open("a") as file:
        file.write('[[check]]\nscorer = "c"\n')
    judges = [Fixed({"package": f"p {n}"}, lambda row: (1.0, "")) for n in (1, 2)]
    monkeypatch.setattr(module, "_provided", lambda *_: lambda *_: judges[0])
    made(teacher)
    monkeypatch.setattr(module, "_provided", lambda *_: lambda *_: judges[1])
    with pytest.raises(VoxError) as caught:
        made(teacher)
    assert caught.value.code == "VOX-O001"
    assert any("p 1" in each and "p 2" in each for each in caught.value.faults)


def test_answers_that_are_cut_off_are_no_rows(teacher, monkeypatch) -> None:
    text = RECIPE.replace("max-tokens = 40", "max-tokens = 2")
    Path("recipe.toml").write_text(text)
    report = made(teacher)
    cut = [line for line in rows("answers.jsonl") if line.get("rejected") == "truncated"]
    assert cut and report.rejected["truncated"] == len(cut)
    assert all("max-tokens" in line["why"] for line in cut)
    assert not {line["answer"] for line in cut} & {row["completion"] for row in rows("train.jsonl")}
    monkeypatch.setattr(module, "_provided", lambda *_: lambda *_, **__: ("An answ", "length"))
    Path("recipe.toml").write_text(text + '[teacher]\nmodel = "m"\n')
    report = made("http://127.0.0.1:1/v1", "served")
    assert (report.kept, report.rejected) == (0, {"truncated": 12})


def test_answers_are_checked_and_rated(teacher, monkeypatch) -> None:
    with Path("recipe.toml").open("a") as file:
        file.write('[[check]]\nscorer = "c"\n[rating]\nscorer = { name = "r" }\nleast = 0.5\n')

    scores = {
        "c": lambda row: (float(row["word"] == "sun"), "is it sun"),
        "r": lambda row: ({1: 0.9, 2: 0.5, 3: 0.2}[row["count"]], "rated"),
    }
    monkeypatch.setattr(
        module, "_provided", lambda *_: lambda table, folder: Fixed(table, scores[table["name"]])
    )
    report = made(teacher)
    answered = [
        line
        for line in rows("answers.jsonl")
        if line.get("rejected") not in ("truncated", "empty answer")
    ]
    assert answered
    assert report.rejected["c"] == sum(line["row"]["word"] == "moon" for line in answered)
    low = [line for line in answered if line["row"]["word"] == "sun" and line["row"]["count"] == 3]
    assert report.rejected.get("rating", 0) == len(low)
    assert {row["rating"] for row in rows("train.jsonl")} <= {0.9, 0.5}
    rejected = rows("rejected.jsonl")
    assert {row["why"] for row in rejected if row["rejected"] == "c"} == {"is it sun"}


def test_equal_and_nearly_equal_rows_go(teacher, monkeypatch) -> None:
    long = "one two three four five six seven eight nine ten eleven twelve"
    answers = iter([long, long, f"{long} more", "short and different", "", "x", "y"])
    Path("recipe.toml").write_text('template = ["same"]\nvalues = { a = [1, 2, 3, 4, 5, 6, 7] }\n')
    fixed = lambda asked, start: [(next(answers), "stop") for _ in asked]  # noqa: E731
    teacher_of = module.Teacher("fixed", {}, fixed)
    monkeypatch.setattr(module, "_at_address", lambda *_: teacher_of)
    report = made("http://127.0.0.1:1/v1")
    assert report.rejected == {"duplicate": 1, "empty answer": 1, "near duplicate": 1}
    assert [row["completion"] for row in rows("train.jsonl")] == [
        long, "short and different", "x", "y",
    ]  # fmt: skip


# --- going on -------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from vox_core.cli import main
from vox_data import generate
generate.BLOCK, append, calls = 4, generate.append, []
def killing(path, data):
    calls.append(path)
    if len(calls) < 2:  # the first block
        return append(path, data)
    with path.open("ab") as file:
        file.write(data[:70])
    os.kill(os.getpid(), signal.SIGKILL)
generate.append = killing
sys.exit(main(sys.argv[1:]))
"""


def test_a_killed_run_goes_on_to_the_same_bytes(teacher) -> None:
    made(teacher, "whole")
    words = ["data", "generate", "--from", teacher, "--recipe", "recipe.toml", "--out", "killed"]
    command = [
        sys.executable,
        "-c",
        KILLED,
        *map(str, words),
        "--backend",
        "cpu",
        "--dtype",
        "fp32",
    ]
    done = subprocess.run(command, check=False, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    assert Path("killed/answers.jsonl").read_bytes().count(b"\n") == 4
    made(teacher, "killed")
    assert files_of("killed") == files_of("whole")


def test_a_stopped_run_says_what_it_keeps(teacher, monkeypatch) -> None:
    def stop(row: Any, given: Any, **_: Any) -> Any:
        if len(rows("answers.jsonl")) >= 8:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(module, "_judged", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        made(teacher)
    assert caught.value.__notes__ == ["8/12 answers are kept in out"]


def test_a_finished_run_computes_nothing(teacher, monkeypatch) -> None:
    made(teacher)
    before = files_of("out")
    monkeypatch.setattr(
        module, "append", lambda path, data: None if not data else pytest.fail("computed")
    )
    made(teacher)
    assert files_of("out") == before


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "fault"),
    [
        ("template = []", "template"),
        ("temlate = ['a']", "temlate is unknown"),
        ("template = ['{topic}']", "no 'topic' for a template in row 1 of the seeds"),
        ("template = ['a']\n[[check]]\nscorer = { n = 1 }", "name the scorer"),
        ("template = ['a'", "it cannot be read"),
        ("template = ['a']\nnear = 2", "near"),
        ("template = ['{x}']\n[values]\nx = []", "[values]: x = []"),
    ],
)
def test_a_recipe_with_faults(teacher, recipe, fault) -> None:
    Path("recipe.toml").write_text(recipe)
    with pytest.raises(VoxError) as caught:
        made(teacher)
    assert caught.value.exit_code == 2
    assert any(fault in each for each in caught.value.faults), caught.value.faults
    assert not Path("out").exists()


def test_seed_rows_with_faults(teacher) -> None:
    for content in ("", "{"):
        Path("seeds.jsonl").write_text(content)
        with pytest.raises(VoxError) as caught:
            made(teacher)
        assert caught.value.exit_code == 2
    Path("seeds.jsonl").unlink()
    with pytest.raises(VoxError) as caught:
        made(teacher)
    assert (caught.value.code, caught.value.remedy) == ("VOX-D001", "correct the path")


def test_another_generation_in_the_folder_is_an_error(teacher, monkeypatch) -> None:
    """Before the teacher is loaded."""
    made(teacher)
    before = files_of("out")
    monkeypatch.setattr(module, "open_model", lambda *_, **__: pytest.fail("loaded"))
    Path("recipe.toml").write_text(RECIPE.replace("temperature = 1", "temperature = 0.5"))
    with pytest.raises(VoxError) as caught:
        made(teacher)
    assert caught.value.code == "VOX-O001"
    assert any("temperature" in each for each in caught.value.faults)
    assert files_of("out") == before
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with pytest.raises(VoxError, match="something else"):
        made(teacher, "mine")


def test_an_address_needs_the_name_of_a_model() -> None:
    with pytest.raises(VoxError) as caught:
        made("http://127.0.0.1:1/v1")
    assert caught.value.code == "VOX-C004"


def test_without_the_plugin_of_scorers_it_is_named(teacher, monkeypatch) -> None:
    monkeypatch.setattr(module, "entry_points", lambda group: [])
    with Path("recipe.toml").open("a") as file:
        file.write('[[check]]\nscorer = "exact"\n')
    with pytest.raises(VoxError) as caught:
        made(teacher)
    assert caught.value.remedy == "vox plugin install scorers"
