"""Tasks of lm-eval on vox's model, against lm-eval's own model."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vox_core.api.generating import GenerateSettings, Question, Sampling, open_model
from vox_core.errors import ConfigError, DataError
from vox_eval.evaluation import Report
from vox_eval.settings import EvalSettings
from vox_scorers import harness

# Before `datasets` is imported: local files need no network.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

TASK = """task: tiny_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{more}
"""
TASKS = {
    "choice": """output_type: multiple_choice
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "likelihood": """output_type: loglikelihood
doc_to_target: " {{choices[0]}}"
metric_list: [{metric: acc}]""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]""",
    "text": """output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["x"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match}]""",
}


def test_without_lm_eval_its_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the package lm-eval"):
        harness.evaluate("model", ["arc_easy"], EvalSettings(), observe=lambda _: None)


@pytest.fixture
def files(tmp_path, write, monkeypatch) -> list[str]:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    ends = ["one", " twenty", " three hundred"]
    rows = [{"question": f"Pick {n}: é ", "choices": ends, "answer": n % 3} for n in range(7)]
    data = write("rows.jsonl", *rows)
    made = []
    for name, more in TASKS.items():
        made.append(write(f"tiny_{name}.yaml", TASK.format(name=name, data=data, more=more)))
    return list(map(str, made))


def evaluate(model: Path, files: list[str], out: str, **given: Any) -> Report:
    settings = EvalSettings(dtype="fp32", out=Path(out), **{"backend": "cpu", **given})
    return harness.evaluate(str(model), files, settings, observe=lambda _: None)


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).glob("[!.]*")}


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_results_are_those_of_lm_evals_own_model(llama, files, backend) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    card = evaluate(llama, files, "out", backend=backend).own.card
    tasks = list(harness._loaded(files).values())
    model = HFLM(pretrained=str(llama), dtype="float32", device="cpu")
    theirs = simple_evaluate(model=model, tasks=tasks, bootstrap_iters=10)
    lines = list(map(json.loads, Path("out/eval.jsonl").read_text("utf-8").splitlines()))
    for name, samples in theirs["samples"].items():
        own = [line for line in lines if line["task"] == name]
        for line, sample in zip(own, samples, strict=True):
            answers = [each[0] for each in sample["resps"]]
            if isinstance(answers[0], str):
                assert line["answer"] == answers[0]
                continue
            expected = [np.atleast_1d(each)[0] for each in answers]
            np.testing.assert_allclose(np.ravel(line["log_probs"]), expected, atol=1e-4)
        figures = {
            key.removesuffix(",none"): value
            for key, value in theirs["results"][name].items()
            if isinstance(value, int | float) and key != "sample_len"
        }
        assert card.tasks[name].metrics == pytest.approx(figures, abs=1e-4, nan_ok=True)
    assert card.tasks["tiny_choice"].binary
    assert not card.tasks["tiny_rolling"].higher_is_better


def test_long_contexts_are_cut_as_lm_evals_own_model_cuts_them(llama, tmp_path) -> None:
    """Whether a continuation is the greedy one, in the windows of `hf`, and texts."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.models.huggingface import HFLM

    from vox_scorers.lm_eval_model import VoxModel

    theirs = HFLM(pretrained=str(llama), dtype="float32", device="cpu")
    with open_model(str(llama), GenerateSettings(backend="cpu", dtype="fp32")) as model:
        ours = VoxModel(model, tmp_path / "requests.jsonl", frozenset({"long"}), lambda _: None)
        length = ours.max_length
        context = " ".join(f"{n} é" for n in range(length))
        given = {"until": [], "max_gen_toks": 6}
        asked = [request("generate_until", context[at:], given) for at in range(3)]
        assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)
        rng, pairs = np.random.default_rng(0), []
        for more in (0, 1, 9, 9, 9, 9):  # tokens that are too many, with a continuation of four
            before = rng.integers(0, len(model.tokenizer), length - 3 + more).tolist()
            question = Question(before[-(length - 3) :], Sampling(max_tokens=4), ())
            ((_, reply),) = model.replies([question])
            for last in (reply.tokens[3], 5):
                pairs.append((("", ""), before, [*reply.tokens[:3], last]))
        found = ours._loglikelihood_tokens(pairs, [True] * len(pairs))
        # As of choices, whose tasks do not need to know.
        assert not ours._loglikelihood_tokens(pairs[:1])[0][1]
        for greedy in (True, False):
            long = [(("", ""), [1], [2] * (length + 1))]
            with pytest.raises(DataError, match="longer than the model can read"):
                ours._loglikelihood_tokens(long, [greedy])
        begun = str(model.tokenizer.decode([ours.prefix_token_id]))
        texts = [("", "Köln"), ("", f"{begun}Köln"), ("In ", "Köln")]
        asked = [request("loglikelihood", *pair) for pair in texts]
        own = ours.loglikelihood(asked)
        np.testing.assert_allclose(own, theirs.loglikelihood(asked, disable_tqdm=True), atol=1e-4)
    expected = theirs._loglikelihood_tokens(pairs, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [bool(greedy) for _, greedy in expected]
    sums = [[total for total, _ in each] for each in (found, expected)]
    np.testing.assert_allclose(*sums, atol=1e-4)


def request(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0, metadata=("long", 0, 1))


def test_an_interrupted_evaluation_continues_to_the_same_bytes(llama, files, monkeypatch) -> None:
    from vox_scorers import lm_eval_model

    monkeypatch.setattr(lm_eval_model, "BLOCK", 4)
    evaluate(llama, files, "out")
    whole = files_of("out")
    lines = whole["requests.jsonl"].splitlines(keepends=True)
    Path("out/requests.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:30])
    for name in ("eval.jsonl", "scorecard.json", "lm-eval.json"):
        Path("out", name).unlink()
    evaluate(llama, files, "out")
    assert files_of("out") == whole


def test_two_models_are_compared(llama, files) -> None:
    report = evaluate(llama, files[:1], "out", against=str(llama))
    assert report.comparison and report.comparison["tiny_choice"].p == 1


@pytest.mark.parametrize(
    ("tasks", "found"),
    [
        (["no_such_task.yaml"], "No such file"),
        (["rows.jsonl.yaml"], "without `task:`"),
        (["broken.yaml"], "FileNotFoundError|Unable to find|DatasetNotFound|Error"),
        ([], "no task"),
    ],
)
def test_tasks_that_are_not_there(llama, files, write, tasks, found) -> None:
    write("rows.jsonl.yaml", "a: b")
    missing = TASK.format(name="none", data="nowhere.jsonl", more=TASKS["choice"])
    write("broken.yaml", missing)
    with pytest.raises(ConfigError, match="lm-eval cannot evaluate") as caught:
        evaluate(llama, tasks, "out")
    caught.match("lm-eval")
    assert re.search(found, str(caught.value.found))
    assert not Path("out").exists()


def test_the_score_of_an_example_is_no_part_of_another_figure() -> None:
    listed = [{"metric": "mcc"}, {"metric": "wer", "higher_is_better": False}, {"metric": "acc"}]
    sample = {"mcc": (1, 0), "wer": 0.5, "acc": 0.0}
    assert harness._metric("t", sample, listed) == "acc"
    with pytest.raises(ConfigError, match="cannot evaluate"):
        harness._metric("t", sample, listed[:2])
