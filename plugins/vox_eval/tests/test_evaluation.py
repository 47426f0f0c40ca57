"""Whole evaluations of a tiny Llama: scores against float64, resuming, folders, comparisons."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from vox_core.api.runs import RunFolder, locked
from vox_core.api.tokenizers import load_tokenizer
from vox_core.contract import Notice
from vox_core.errors import PluginError, TrainingError, VoxError
from vox_eval import evaluation
from vox_eval.evaluation import Report, evaluate_and_compare
from vox_eval.scorer import Score
from vox_eval.scorers import Exact
from vox_eval.settings import EvalSettings
from vox_testing.llama import llama_logits


@pytest.fixture
def run(suite, llama, tmp_path):
    """`run(suite=, out=, ...)` -> the report of an evaluation of the tiny Llama."""

    def made(model: Path = llama, observe: Any = lambda _: None, **given: Any) -> Report:
        settings = EvalSettings(**{"suite": (suite,), "dtype": "fp32", "backend": "cpu", **given})
        return evaluate_and_compare(str(model), settings, observe=observe)

    return made


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "BLOCK", 4)


def lines_of(report: Report) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (report.own.folder / "eval.jsonl").open()]


def files_of(folder: Path) -> dict[str, bytes]:
    names = ("evaluation.json", "eval.jsonl", "scorecard.json")
    return {name: (folder / name).read_bytes() for name in names}


class Reference:
    """Log-probabilities of the tiny Llama in float64."""

    def __init__(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self.tokenizer = load_tokenizer(folder)

    def log_probs(self, tokens: list[int], first: int) -> np.ndarray:
        logits_TV = llama_logits(self.weights, np.array(tokens))
        logits_TV -= logits_TV.max(1, keepdims=True)
        log_probs_TV = logits_TV - np.log(np.exp(logits_TV).sum(1, keepdims=True))
        return np.array([log_probs_TV[t - 1, tokens[t]] for t in range(first, len(tokens))])


TWO = ("say", "warm")
"""The tasks with answers, the second one sampled."""


# --- scores ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(llama) -> Reference:
    return Reference(llama)


def test_log_probabilities_of_choices_are_those_of_float64(run, reference) -> None:
    picks = [line for line in lines_of(run()) if line["task"] == "pick"]
    ends = ["one", "twenty", " three hundred"]
    right = ["one", "twenty", "one"]
    for line, ideal in zip(picks, right, strict=True):
        said = line["prompt"][0]["content"]
        prompt = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        before = reference.tokenizer(prompt)["input_ids"]
        sums = []
        for end, found in zip(ends, line["log_probs"], strict=True):
            tokens = before + reference.tokenizer(end)["input_ids"]
            expected = reference.log_probs(tokens, len(before))
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
            sums.append(expected.sum() / len(end.encode()))
        best = ends[int(np.argmax(sums))]
        assert (line["answer"], line["score"]) == (best, float(best == ideal))


def test_a_texts_tokens_are_scored_once_each(run, reference, monkeypatch) -> None:
    """In windows of 64 tokens, each with the last token of the one before in front."""
    monkeypatch.setattr(evaluation, "WINDOW", 64)
    texts = [line for line in lines_of(run()) if line["task"] == "text"]
    tokenizer = reference.tokenizer
    for line in texts:
        tokens = [tokenizer.bos_token_id, *tokenizer(line["prompt"])["input_ids"]]
        parts = [tokens[at : at + 64] for at in range(0, len(tokens) - 1, 63)]
        assert [len(part) for part in line["log_probs"]] == [len(part) - 1 for part in parts]
        for found, part in zip(line["log_probs"], parts, strict=True):
            np.testing.assert_allclose(found, reference.log_probs(part, 1), rtol=1e-5, atol=1e-5)
        bits = -sum(map(sum, line["log_probs"])) / np.log(2)
        assert line["score"] == pytest.approx(bits / len(line["prompt"].encode()))


def test_the_scorecard_is_the_mean_of_the_lines(run) -> None:
    report = run()
    card = json.loads((report.own.folder / "scorecard.json").read_text())
    lines = lines_of(report)
    for id, task in card["tasks"].items():
        own = [line for line in lines if line["task"] == id]
        scores, weights = ([line[key] for line in own] for key in ("score", "weight"))
        assert task["score"] == pytest.approx(np.average(scores, weights=weights))
        assert task["interval"][0] <= task["score"] <= task["interval"][1]
    scores = {id: task["score"] for id, task in card["tasks"].items()}
    assert card["score"] == pytest.approx((3 * scores["say"] + scores["warm"] + scores["pick"]) / 5)
    assert card["tasks"]["text"]["metrics"].keys() == {"perplexity"}


@pytest.mark.parametrize("rows", [1, 3])
def test_answers_do_not_depend_on_the_batch(run, monkeypatch, rows) -> None:
    answers = [line["answer"] for line in lines_of(run())]
    monkeypatch.setattr("vox_core.run.load.most_rows", lambda _: rows)
    assert [line["answer"] for line in lines_of(run(out=Path("alone")))] == answers


def test_sampled_answers_differ_from_row_to_row(run, write) -> None:
    write("say.jsonl", *[{"prompt": "Say it.", "ideal": "it"}] * 5)
    answers = {id: {line["answer"] for line in lines_of(run()) if line["task"] == id} for id in TWO}
    assert len(answers["say"]) == 1 < len(answers["warm"])


def test_cpu_and_mlx_give_the_same_scores(run) -> None:
    ours, theirs = (run(backend=backend) for backend in ("cpu", "mlx"))
    assert ours.own.card.suite_digest == theirs.own.card.suite_digest
    assert ours.own.folder != theirs.own.folder
    for one, other in zip(lines_of(ours), lines_of(theirs), strict=True):
        assert one["answer"] == other["answer"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)
        for a, b in zip(one["log_probs"], other["log_probs"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# --- resuming -------------------------------------------------------------------------------------


class Stopped(Exception):
    """Of a test, in the middle of the work."""


@pytest.mark.parametrize("at", [1, 6, 14])
def test_a_stopped_evaluation_continues_to_the_same_bytes(run, at) -> None:
    whole = files_of(run(out=Path("whole")).own.folder)

    def stop(event: object) -> None:
        if isinstance(event, Notice) and event.message.startswith(f"{at}/"):
            raise Stopped

    with pytest.raises(Stopped):
        run(out=Path("stopped"), observe=stop)
    kept = Path("stopped/eval.jsonl").read_bytes()
    assert kept.count(b"\n") == 4 * ((at - 1) // 4)
    assert not Path("stopped/scorecard.json").exists()
    said: list[str] = []
    run(out=Path("stopped"), observe=lambda event: said.append(event.message))
    assert files_of(Path("stopped")) == whole
    assert any("examples are there from an earlier call" in each for each in said) == (at > 4)


def test_a_torn_block_is_computed_again(run) -> None:
    """From its first row on: rows that share a batch share its roundoff."""
    whole = files_of(run(out=Path("whole")).own.folder)
    lines = whole["eval.jsonl"].splitlines(keepends=True)
    Path("whole/eval.jsonl").write_bytes(b"".join(lines[:6]) + lines[6][:20])
    Path("whole/scorecard.json").unlink()
    said: list[str] = []
    run(out=Path("whole"), observe=lambda event: said.append(event.message))
    assert "4/15 examples are there from an earlier call" in said
    assert files_of(Path("whole")) == whole


def test_a_finished_evaluation_computes_nothing(run, monkeypatch) -> None:
    first = run()
    monkeypatch.setattr(evaluation, "_outputs", lambda *_: pytest.fail("computed"))
    assert run().own.folder == first.own.folder


KILLED = """
import os, signal, sys
from vox_core.cli import main
from vox_eval import evaluation
evaluation.BLOCK, append, calls = 4, evaluation.append, []
def killing(path, data):
    calls.append(path)
    if len(calls) < 2:  # the first block
        return append(path, data)
    with path.open("ab") as file:
        file.write(data[:100])
    os.kill(os.getpid(), signal.SIGKILL)
evaluation.append = killing
sys.exit(main(sys.argv[1:]))
"""


def test_a_killed_process_leaves_what_the_next_one_continues(run, suite, llama) -> None:
    words = ["eval", llama, "--suite", suite, "--out", "killed", "--dtype", "fp32"]
    command = [sys.executable, "-c", KILLED, *map(str, words), "--backend", "cpu"]
    done = subprocess.run(command, check=False)
    assert done.returncode == -signal.SIGKILL
    assert Path("killed/eval.jsonl").read_bytes().count(b"\n") == 4
    run(out=Path("killed"))
    assert files_of(Path("killed")) == files_of(run(out=Path("whole")).own.folder)


# --- folders --------------------------------------------------------------------------------------


def test_another_evaluation_in_the_folder_is_an_error(run, other_llama) -> None:
    run(out=Path("out"))
    before = files_of(Path("out"))
    for given in ({"limit": 1}, {"backend": "mlx"}, {"dtype": "bf16"}, {"model": other_llama}):
        with pytest.raises(VoxError) as caught:
            run(out=Path("out"), **given)
        assert (caught.value.code, caught.value.exit_code) == ("VOX-O001", 2)
        assert caught.value.faults, given
    assert files_of(Path("out")) == before


@pytest.mark.parametrize(
    "content",
    [
        b'{"task": "say", "row": "other"}\n' * 4,
        b'{"task": "say", "row": "other", "score": null, "weight": 1}\n' * 4,
        b"text\n" * 4,
    ],
)
def test_lines_of_something_else_are_an_error(run, content) -> None:
    run(out=Path("out"))
    Path("out/eval.jsonl").write_bytes(content)
    with pytest.raises(VoxError) as caught:
        run(out=Path("out"))
    assert caught.value.code == "VOX-O001"
    assert Path("out/eval.jsonl").read_bytes() == content


def test_scores_that_the_scorer_no_longer_gives_are_an_error(run) -> None:
    """Such as those of a scorer that became binary in the same version of its package."""
    content = Path(run(out=Path("out")).own.folder, "eval.jsonl").read_text()
    Path("out/eval.jsonl").write_text(content.replace('"score": 0', '"score": -489', 1))
    with pytest.raises(VoxError) as caught:
        run(out=Path("out"))
    assert caught.value.code == "VOX-O001"
    assert "scores that its scorer does not give now" in str(caught.value.found)


def test_a_folder_of_something_else_is_left_alone(run, monkeypatch) -> None:
    """It, a file, and the evaluation of another suite are refused before the model is loaded."""
    run(out=Path("out"))
    monkeypatch.setattr(evaluation, "open_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(VoxError) as caught:
        run(out=Path("out"), limit=1)
    assert caught.value.code == "VOX-O001"
    assert any("tasks.say.examples: then 5, now 1" in each for each in caught.value.faults)
    with pytest.raises(VoxError) as caught:
        run(out=Path("suite.toml"))
    assert (caught.value.code, caught.value.found) == ("VOX-O001", "a file")
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with pytest.raises(VoxError) as caught:
        run(out=Path("mine"))
    assert (caught.value.code, caught.value.found) == ("VOX-O001", "notes.txt")
    assert [each.name for each in Path("mine").iterdir()] == ["notes.txt"]


def test_two_processes_do_not_write_one_folder(run, monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "open_model", lambda *_, **__: pytest.fail("loaded"))
    with locked(RunFolder(Path("out"))), pytest.raises(VoxError) as caught:
        run(out=Path("out"))
    assert caught.value.code == "VOX-O003"
    assert not Path("out/evaluation.json").exists()


def test_an_example_that_does_not_fit_is_refused_before_any_work(run, write) -> None:
    write("pick.jsonl", {"prompt": "a" * 600, "choices": ["x", "y"], "ideal": 0})
    with pytest.raises(VoxError) as caught:
        run(out=Path("out"))
    assert (caught.value.code, caught.value.where) == (
        "VOX-D007",
        "task 'pick', example 1 of pick.jsonl",
    )
    assert not Path("out").exists()


@pytest.mark.parametrize("score", [Score(0.5), Score(float("nan")), Score(1, weight=2)])
def test_a_wrong_score_of_a_scorer_is_an_error(run, monkeypatch, score) -> None:
    monkeypatch.setattr(Exact, "score", lambda *_: score)
    with pytest.raises(PluginError, match="gave a wrong score"):
        run()


def test_a_scorer_that_raises_is_named(run, monkeypatch) -> None:
    monkeypatch.setattr(Exact, "score", lambda *_: 1 / 0)
    with pytest.raises(PluginError, match="scorer 'exact' failed in score, at task "):
        run()


def test_a_scorer_that_returns_no_score_is_named(run, monkeypatch) -> None:
    monkeypatch.setattr(Exact, "score", lambda *_: 1.0)
    with pytest.raises(PluginError, match="scorer 'exact' failed in score, at task ") as caught:
        run()
    assert caught.value.found.startswith("TypeError: it returned a float, expected Score")


def test_log_probabilities_that_are_not_finite_are_an_error(run, monkeypatch) -> None:
    broken = lambda _, documents: [np.full(1, np.nan) for _ in documents]  # noqa: E731
    monkeypatch.setattr(evaluation, "log_probs", broken)
    with pytest.raises(TrainingError, match="not finite"):
        run()


# --- comparing ------------------------------------------------------------------------------------


def test_a_model_is_better_where_enough_rows_say_so(run, write, llama, other_llama) -> None:
    """On texts that the first model finds more likely than the second."""
    rng = np.random.default_rng(0)
    texts = ["".join(chr(c) for c in rng.integers(97, 123, 30)) for _ in range(40)]
    write("text.jsonl", *({"text": text} for text in texts))
    first, second = (run(model).own.card.values["text"] for model in (llama, other_llama))
    better = [text for text, a, b in zip(texts, first, second, strict=True) if a < b][:12]
    write("text.jsonl", *({"text": text} for text in better))
    said: list[str] = []
    report = run(against=str(other_llama), observe=lambda event: said.append(event.message))
    assert report.comparison
    assert said[3].startswith("text: 12 rows show, at 80% power, a mean difference of ")
    found = report.comparison["text"]
    assert found.difference == pytest.approx(found.first.score - found.second.score)
    assert found.interval[0] < found.difference < found.interval[1] < 0
    assert found.p == 2 / 2**12
    assert found.adjusted == 4 * found.p
    assert found.verdict == "better"
    assert report.comparison["pick"].verdict == "no difference shown"
    reverse = run(other_llama, against=str(llama)).comparison
    assert reverse and reverse["text"].verdict == "worse"


def test_the_page_has_the_samples_of_both_models(run, llama, other_llama) -> None:
    run(out=Path("one"))
    alone = Path("one/scorecard.html").read_text()
    assert alone.count("user: Say 3.") == 2 and f"tiny: {llama}" in alone
    run(against=str(other_llama), out=Path("one"))
    both = Path("one/scorecard.html").read_text()
    assert both.count(f"tiny: {llama} against {other_llama}") == 2  # title and heading
    assert both.count("user: Say 3.") == 2


def test_the_page_of_a_text_with_a_line_separator(run, write) -> None:
    write("text.jsonl", {"text": "One line.\u2028The next one.\x85A third."}, {"text": "Two."})
    run(out=Path("one"))
    assert "The next one." in Path("one/scorecard.html").read_text()


def test_rows_of_one_source_count_as_one(run, write) -> None:
    rows = [{"text": f"A text, {n} words.", "source": f"book {n % 4}"} for n in range(8)]
    write("text.jsonl", *rows)
    report = run(out=Path("out"))
    line = next(each for each in lines_of(report) if each["task"] == "text")
    assert line["source"] == "book 0"
    values, task = report.own.card.values["text"], report.own.card.tasks["text"]
    assert (len(values), task.examples) == (4, 8)
    both = [each for each in lines_of(report) if each.get("source") == "book 1"]
    weights = [each["weight"] for each in both]
    expected = sum(w * each["score"] for w, each in zip(weights, both, strict=True)) / sum(weights)
    assert values[1] == pytest.approx(expected, rel=1e-12)


def test_rows_of_one_source_have_no_interval(run, other_llama, write) -> None:
    rows = [{"text": f"A text, {n} words.", "source": "book"} for n in range(8)]
    write("text.jsonl", *rows)
    said: list[str] = []
    observe = lambda event: said.append(event.message)  # noqa: E731
    report = run(against=str(other_llama), out=Path("out"), observe=observe)
    assert "text: too few sources (1) to show any difference" in said
    compared = report.comparison["text"]
    assert compared.interval is compared.first.interval is None
    assert (compared.p, compared.verdict) == (1, "no difference shown")
    stored = json.loads(Path("out/scorecard.json").read_text())["tasks"]["text"]
    assert stored["interval"] is None and "(equal values)" in Path("out/scorecard.html").read_text()


def test_an_earlier_evaluation_is_compared_without_its_model(run, other_llama) -> None:
    compared = run(against=str(other_llama), out=Path("both"))
    earlier = run(other_llama, out=Path("earlier"))
    again = run(against="earlier", out=Path("both"))
    assert again.comparison == compared.comparison
    assert files_of(Path("both/against")) == files_of(earlier.own.folder)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (lambda: Path("earlier/scorecard.json").unlink(), "files that cannot be read"),
        (lambda: Path("earlier/eval.jsonl").write_text("x\n"), "changed after"),
    ],
)
def test_an_earlier_evaluation_that_cannot_be_compared(run, broken, found) -> None:
    run(out=Path("earlier"))
    broken()
    with pytest.raises(VoxError, match="cannot be compared") as caught:
        run(against="earlier", out=Path("new"))
    assert (caught.value.code, caught.value.exit_code) == ("VOX-C011", 2)
    assert found in str(caught.value.found)
    assert not Path("new").exists()


def test_an_earlier_evaluation_of_other_rows(run) -> None:
    run(out=Path("earlier"), limit=2)
    with pytest.raises(VoxError, match="cannot be compared"):
        run(against="earlier")
