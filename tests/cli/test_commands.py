"""What each command hands to its service, and what it prints of the answer.

Progress is on stderr, results on stdout; `--json` prints one object.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.services import WHY, Merging, Training, Voice
from vox_core.catalog import load_catalog
from vox_core.host import Verdict
from vox_core.models import LocalModel


@pytest.fixture
def voice(monkeypatch: pytest.MonkeyPatch) -> Voice:
    service = Voice()
    monkeypatch.setattr("vox_core.run.load.open_model", service)
    return service


# --- train ----------------------------------------------------------------------------------------


def test_train_prints_results_on_stdout_and_progress_on_stderr(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_core.run.train.train", Training())
    done = vox("train", "--out", "runs/a")
    assert done.code == 0
    assert done.out.splitlines() == [
        "run            runs/a",
        "steps          3 of 3 in 0:12",
        "loss           3.0000",
        "held-out loss  4.0000 -> 1.0000 (75 % lower)",
        "next: vox chat runs/a   or   vox merge runs/a",
    ]
    assert WHY in done.err
    assert "step 3/3" in done.err


def test_train_as_json(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_core.run.train.train", Training())
    done = vox("train", "--out", "runs/a", "--json")
    assert json.loads(done.out) == {
        "run": "runs/a",
        "stopped": False,
        "steps": 3,
        "total_steps": 3,
        "seconds": 12.0,
        "loss": 3.0,
        "valid_before": 4.0,
        "valid_after": 1.0,
    }


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_stopped_run_exits_130_and_says_how_to_go_on(vox, monkeypatch, flags) -> None:
    monkeypatch.setattr("vox_core.run.train.train", Training(stopped=True))
    done = vox("train", "--out", "runs/a", *flags)
    assert done.code == 130
    assert done.err.endswith("stopped; go on with: vox train --resume runs/a\n")
    assert "next:" not in done.out


# --- merge ----------------------------------------------------------------------------------------


def test_merge_shows_its_proof(vox, monkeypatch) -> None:
    service = Merging()
    monkeypatch.setattr("vox_core.run.merge.merge", service)
    done = vox("merge", "runs/a", "--out", "whole")
    assert (done.code, done.err) == (0, "proving\n")
    assert service.calls[0][0] == "runs/a"
    assert done.out.splitlines() == [
        "merged   whole",
        "base     m, 14 modules changed",
        "proof    logits differ from base + adapter by 1.0e-04 (allowed 1.0e-02) at 32 positions",
        "adapter  changes the logits by 3.0e-01; 100.0% of that is in the merged model",
        "next: vox chat whole",
    ]


def test_merge_as_json(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_core.run.merge.merge", Merging())
    result = json.loads(vox("merge", "runs/a", "--json").out)
    assert (result["out"], result["proof"]["positions"]) == ("runs/a-merged", 32)


# --- generate -------------------------------------------------------------------------------------


def test_generate_prints_the_answer_alone(vox, voice: Voice) -> None:
    done = vox("generate", "runs/a", "--prompt", "hello", "--temperature", 0.5)
    assert (done.code, done.out) == (0, "1:HELLO\n")
    assert done.err.splitlines() == ["downloading: 0 MB of 0 MB", WHY]
    assert voice.calls[0][0] == "runs/a"
    assert voice.calls[0][1].temperature == 0.5


def test_generate_reads_the_prompt_from_stdin(vox, voice: Voice) -> None:
    assert vox("generate", "m", "--prompt", "-", stdin="two\nlines\n").out == "1:TWO\nLINES\n"


def test_generate_as_json(vox, voice: Voice) -> None:
    done = vox("generate", "m", "--prompt", "hé", "--json")
    assert json.loads(done.out) == {"model": "m", "prompt": "hé", "answer": "1:HÉ"}


@pytest.mark.parametrize(("prompt", "stdin"), [(" ", ""), ("-", "\n")])
def test_an_empty_prompt_is_refused(vox, voice: Voice, prompt: str, stdin: str) -> None:
    done = vox("generate", "m", "--prompt", prompt, stdin=stdin)
    assert (done.code, done.out, voice.calls) == (2, "", [])
    assert "the prompt is empty" in done.err


# --- model, backend -------------------------------------------------------------------------------


def test_model_list(vox) -> None:
    entries = load_catalog().models
    done = vox("model", "list")
    assert [line.split()[0] for line in done.out.splitlines()] == [*entries]
    listed = json.loads(vox("model", "list", "--json").out)
    assert [entry["sha256"] for entry in listed] == [entry.sha256 for entry in entries.values()]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_model_pull(vox, monkeypatch, flags) -> None:
    def resolve(reference, *, progress):
        progress("downloading", 10**8, 10**8)
        return LocalModel(Path("cache/m"), reference, "abc", "Apache-2.0", "llama")

    monkeypatch.setattr("vox_core.models.resolve", resolve)
    done = vox("model", "pull", "smollm2-135m", *flags)
    assert done.err == "downloading: 100 MB of 100 MB\n"
    sha256 = load_catalog().models["smollm2-135m"].sha256
    if flags:
        assert json.loads(done.out) == {
            "id": "smollm2-135m",
            "path": "cache/m",
            "sha256": sha256,
            "revision": "abc",
            "licence": "Apache-2.0",
            "model_type": "llama",
        }
    else:
        assert f"sha256      {sha256}\n" in done.out
        assert "path        cache/m\n" in done.out


def test_model_pull_of_an_unknown_model(vox) -> None:
    done = vox("model", "pull", "smollm2-135")
    assert (done.code, done.out) == (2, "")
    assert "did you mean smollm2-135m?" in done.err


VERDICTS = (
    Verdict("cpu", "0.1.0", "vox-ml-cpu", "eligible", "2 cores"),
    Verdict("longer", "1", "other", "broken", "no manifest"),
)


def test_backend_list(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_core.host.list_backends", lambda: VERDICTS)
    assert vox("backend", "list").out.splitlines() == [
        "cpu     0.1.0  eligible  2 cores",
        "longer  1      broken    no manifest",
    ]
    listed = json.loads(vox("backend", "list", "--json").out)
    assert [each["status"] for each in listed] == ["eligible", "broken"]


def test_backend_list_without_backends(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_core.host.list_backends", lambda: ())
    done = vox("backend", "list")
    assert (done.code, done.out) == (0, "")
    assert "vox plugin install cpu" in done.err
    assert vox("backend", "list", "--json").out == "[]\n"
