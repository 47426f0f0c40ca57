"""What each command hands to its service, and what it prints of the answer.

Progress is on stderr, results on stdout; `--json` prints one object.
"""

from __future__ import annotations

import errno
import io
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.services import STEP, WHY, Merging, Training, Voice, start
from tests.run.history_samples import make_run
from vox_core.catalog import load_catalog
from vox_core.config import MergeSettings
from vox_core.contract import LaunchResult, ObjectiveMetrics, World
from vox_core.errors import AdapterError
from vox_core.host import Seen, Verdict
from vox_core.models import LocalModel
from vox_core.run.merge import MergeReport, Requantised
from vox_core.run.reference import resolve_reference
from vox_core.run.session import StoppedAtOnce


@pytest.fixture
def voice(monkeypatch: pytest.MonkeyPatch) -> Voice:
    service = Voice()
    monkeypatch.setattr("vox_core.run.load.open_model", service)
    return service


@pytest.fixture
def _told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vox_core.display.WORTH_SECONDS", 0.0)


# --- train ----------------------------------------------------------------------------------------


def test_train_prints_results_on_stdout_and_progress_on_stderr(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_core.run.train.train", Training())
    done = vox("train", "--out", "runs/a")
    assert done.code == 0
    assert done.out.splitlines() == [
        "run              runs/a",
        "steps            3 of 3 in 0:12 (startup 4.2 s)",
        "loss             3.0000",
        "validation loss  4.0000 -> 1.0000 (75 % lower)",
        "next: vox chat runs/a   or   vox serve runs/a   or   vox merge runs/a",
    ]
    assert WHY in done.err
    assert "step 3/3" in done.err


def test_no_next_step_presumes_that_a_run_has_learned(vox, monkeypatch) -> None:
    short = {"best_step": 3, "rows": 5, "epochs": 1.0, "lr": 2e-4}
    for learned in (True, False):
        made = Training(report={**short, "learned": learned})
        monkeypatch.setattr("vox_core.run.train.train", made)
        done = vox("train", "--out", "runs/a")
        assert ("next: " in done.out, "hint: " in done.out) == (learned, learned)


def test_train_as_json(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_core.run.train.train", Training())
    done = vox("train", "--out", "runs/a", "--json")
    assert json.loads(done.out) == {
        "run": "runs/a",
        "model": None,
        "stopped": False,
        "steps": 3,
        "warnings": [],
        "total_steps": 3,
        "seconds": 12.0,
        "startup_seconds": 4.25,
        "loss": 3.0,
        "valid_before": 4.0,
        "valid_after": 1.0,
        "best_step": None,
        "best_loss": None,
        "rewarded": False,
        "adapter_step": None,
        "rows": None,
        "epochs": None,
        "lr": None,
        "objective": "sft",
        "learned": True,
    }


def test_a_short_run_ends_with_a_hint(vox, monkeypatch) -> None:
    def hints(**report: Any) -> list[str]:
        facts = {"rows": 20, "epochs": 1.0, **report}
        monkeypatch.setattr("vox_core.run.train.train", Training(report=facts))
        lines = vox("train", "--out", "runs/a").out.splitlines()
        return [line for line in lines if line.startswith("hint")]

    said = "hint: few steps (3). Try --epochs 12 --batch-size 4{} (about 60 steps), or more "
    said += "examples than 20"
    assert hints() == [said.format(" --lr 1e-3")]
    without = [said.format("")]
    assert hints(model=Path("runs/a/model")) == hints(lr=3e-3) == without
    assert hints(objective="dpo") == without
    assert hints(epochs=None) == hints(best_step=2, best_loss=0.5) == []
    monkeypatch.setattr("vox_core.cli.train.SHORT_RUN", 3)
    assert hints() == []


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_stopped_run_exits_130_and_says_how_to_go_on(vox, monkeypatch, flags) -> None:
    monkeypatch.setattr("vox_core.run.train.train", Training(stopped=True))
    done = vox("train", "--out", "runs/a", *flags)
    assert done.code == 130
    assert done.err.endswith("stopped; resume with: vox train --resume runs/a\n")
    assert "next:" not in done.out


def test_a_stopped_run_exits_130_without_a_terminal_to_write_to(vox, monkeypatch) -> None:
    """As after SIGHUP, when the terminal is gone with stdout and stderr."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", Gone())
    monkeypatch.setattr("vox_core.run.train.train", Training(stopped=True))
    assert vox("train", "--out", "runs/a").code == 130
    monkeypatch.setattr("vox_core.run.train.train", Training())
    assert vox("train", "--out", "runs/a").code == 1


def test_a_stopped_run_of_several_processes_resumes_with_as_many(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_core.run.train.train", Training(stopped=True))
    monkeypatch.setattr("vox_core.cli.train.world_of", lambda: World(0, 2))
    done = vox("train", "--out", "runs/a", "--processes", 2, "--shard")
    assert done.err.endswith("resume with: vox train --resume runs/a --processes 2 --shard\n")
    Path("vox.toml").write_text("[train]\nshard = true\n")
    done = vox("train", "--out", "runs/a", "--processes", 2, "--no-shard")
    assert done.err.endswith("resume with: vox train --resume runs/a --processes 2 --no-shard\n")


def test_more_processes_than_examples_are_refused_before_any_starts(vox, monkeypatch) -> None:
    jobs = []
    monkeypatch.setattr(
        "vox_core.cli.train.call_hook",
        lambda *_, job, **__: jobs.append(job) or LaunchResult(0),
    )
    done = vox("train", "--processes", 9, "--out", "runs/a")
    assert (done.code, jobs) == (2, [])
    assert "VOX-C004" in done.err and "8 examples in a step" in done.err
    assert vox("train", "--processes", 8, "--out", "runs/a").code == 0
    assert jobs[0].resume == "vox train --resume runs/a --processes 8"


@pytest.mark.parametrize(("step", "kept"), [(7, "saved up to step 7"), (None, "nothing was saved")])
def test_a_run_stopped_at_once_says_what_is_kept(vox, monkeypatch, step, kept) -> None:
    """The words do not depend on which signal it was."""
    service = Training(at_once=StoppedAtOnce(Path("runs/a"), step))
    monkeypatch.setattr("vox_core.run.train.train", service)
    done = vox("train", "--out", "runs/a")
    assert (done.code, done.out) == (130, "")
    assert done.err == f"stopped at once, {kept}; resume with: vox train --resume runs/a\n"


@pytest.mark.parametrize(
    ("adapter", "said"),
    [(2, "this"), (3, "--load-best-at-end would have written its")],
)
def test_the_best_step_is_shown_where_it_is_not_the_last(vox, monkeypatch, adapter, said) -> None:
    best = {"best_step": 2, "best_loss": 0.5, "adapter_step": adapter}
    for what, report in (("adapter", best), ("model", {**best, "model": Path("runs/a/model")})):
        monkeypatch.setattr("vox_core.run.train.train", Training(report=report))
        lines = vox("train", "--out", "runs/a").out.splitlines()
        assert f"best             0.5000 after step 2; {said} {what}" in lines


def test_the_validation_of_a_run_with_rewards_is_shown_as_a_reward(vox, monkeypatch) -> None:
    report = {"valid_before": -0.25, "valid_after": -0.5, "best_step": 2, "best_loss": -0.75}
    monkeypatch.setattr("vox_core.run.train.train", Training(report={**report, "rewarded": True}))
    rewards = enumerate((0.125, math.nan, 0.5), 1)
    make_run(Path("runs/a"), [ObjectiveMetrics(step, {"reward": each}) for step, each in rewards])
    lines = vox("train", "--out", "runs/a").out.splitlines()
    assert "reward             0.1250 -> 0.5000" in lines
    assert "validation reward  0.2500 -> 0.5000" in lines
    assert any(line.startswith("best               0.7500 after step 2") for line in lines)


def test_the_flags_of_stopping_and_going_on_reach_the_service(vox, monkeypatch) -> None:
    service = Training()
    monkeypatch.setattr("vox_core.run.train.train", service)
    flags = "--resume auto --out a --max-time 90m --patience 3 --load-best-at-end"
    more = "--max-bad-steps 5 --allow-change lr --allow-change epochs"
    assert vox("train", *flags.split(), *more.split()).code == 0
    made = service.calls[0]["settings"]
    assert (made.resume, made.max_time, made.patience) == ("auto", 5400, 3)
    assert made.load_best_at_end
    assert (made.max_bad_steps, made.allow_change) == (5, ("lr", "epochs"))
    done = vox("train", "--resume", "a", "--allow-change", "rank")
    assert done.code == 2
    assert "'lr'" in done.err


def test_a_command_to_run_next_is_quoted_for_a_shell(vox, monkeypatch, tmp_path) -> None:
    """Of a run whose name has a space and a quote: what is copied names that folder."""
    run, there = "it's mine/a run", "over there/it's"
    services = {"train": Training(), "merge": Merging()}
    for name, service in services.items():
        monkeypatch.setattr(f"vox_core.run.{name}.{name}", service)

    def said(line: str, before: str) -> list[str]:
        return shlex.split(line.partition(before)[2])

    def last(*command: str) -> str:
        return vox(*command).out.splitlines()[-1]

    chat, _serve, merge = last("train", "--out", run).removeprefix("next: ").split("   or   ")
    assert (shlex.split(chat), shlex.split(merge)) == (["vox", "chat", run], ["vox", "merge", run])
    assert said(last("merge", run, "--out", there), "next: ") == ["vox", "chat", there]
    services["train"].stopped = True
    resume = ["vox", "train", "--resume", run]
    assert said(vox("train", "--out", run).err.splitlines()[-1], "resume with: ") == resume
    make_run(tmp_path / run, [start(4), STEP])
    assert said(vox("runs", "show", run).out, "next") == resume
    (tmp_path / run / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(AdapterError) as caught:
        resolve_reference(run)
    assert said(caught.value.remedy, "finish it: ") == resume


# --- merge ----------------------------------------------------------------------------------------


def test_merge_shows_its_proof(vox, monkeypatch) -> None:
    service = Merging()
    monkeypatch.setattr("vox_core.run.merge.merge", service)
    done = vox("merge", "runs/a", "--out", "whole")
    assert (done.code, done.err) == (0, "proving\n")
    assert service.calls[0][0] == "runs/a"
    assert done.out.splitlines() == [
        "merged    whole",
        "base      m, 14 modules changed",
        "verified  logits differ from base + adapter by 1.0e-04 (allowed 1.0e-02), median of 32 "
        "positions",
        "adapter   changes the logits by 3.0e-01; 83% of that survives rounding to bf16 "
        "(--dtype fp32 keeps all of it)",
        "next: vox chat whole",
    ]


def test_merge_tells_of_the_quantised_base_and_of_what_it_wrote_quantised(vox, monkeypatch) -> None:
    proof = replace(Merging()("a", MergeSettings(), observe=str).proof, from_trained=0.005)
    far = MergeReport(Path("whole"), "m", 14, replace(proof, from_trained=0.125))
    monkeypatch.setattr("vox_core.run.merge.merge", lambda *_, **__: far)
    trained = (
        "trained   logits differ by 1.2e-01 from the adapter on the quantised base it was trained"
    )
    hint = f"{trained} on (--onto trained-base merges into that one)"
    assert vox("merge", "runs/a").out.splitlines()[-2] == hint
    for distance, said in (
        (0.0625, "affine4; logits differ by 6.2e-02 from the merged model's"),
        (None, "affine4; no installed backend loads it, so its logits were not verified"),
    ):
        report = MergeReport(Path("whole"), "m", 14, proof, Requantised("affine4", distance))
        monkeypatch.setattr("vox_core.run.merge.merge", lambda *_, told=report, **__: told)
        done = vox("merge", "runs/a", "--quant", "affine4", "--onto", "trained-base")
        assert done.out.splitlines()[-3:-1] == [
            "trained    logits differ by 5.0e-03 from the adapter on the quantised base it was "
            "trained on",
            f"quantised  {said}",
        ]


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (("train", "--data", "d"), {"quant": "nvfp4"}),
        (("merge", "runs/a"), {"quant": "mxfp4", "onto": "trained-base"}),
        (("generate", "runs/a", "Hi"), {"quant": "none"}),
    ],
)
def test_quantisation_reaches_the_service(vox, voice, monkeypatch, command, settings) -> None:
    services = {"train": Training(), "merge": Merging()}
    for name, service in services.items():
        monkeypatch.setattr(f"vox_core.run.{name}.{name}", service)
    flags = [part for key, value in settings.items() for part in (f"--{key}", value)]
    assert vox(*command, *flags).code == 0
    calls = services[command[0]].calls if command[0] in services else voice.calls
    call = calls[0]
    seen = call["settings"] if isinstance(call, dict) else call[1]
    assert {key: getattr(seen, key) for key in settings} == settings


def test_merge_as_json(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_core.run.merge.merge", Merging())
    result = json.loads(vox("merge", "runs/a", "--json").out)
    assert (result["out"], result["proof"]["positions"]) == ("runs/a-merged", 32)


# --- generate -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_told_at_once")
def test_generate_prints_the_answer_alone(vox, voice: Voice) -> None:
    done = vox("generate", "runs/a", "hello", "--temperature", 0.5)
    assert (done.code, done.out) == (0, "1:HELLO\n")
    assert done.err.splitlines() == ["downloading: 0 MB of 0 MB", WHY]
    assert voice.calls[0][0] == "runs/a"
    assert voice.calls[0][1].temperature == 0.5


def test_the_prompt_may_follow_the_model(vox, voice: Voice) -> None:
    assert vox("generate", "m", "hello there").out == "1:HELLO THERE\n"
    assert vox("generate", "m").code == 2


def test_generate_reads_the_prompt_from_stdin(vox, voice: Voice) -> None:
    assert vox("generate", "m", "-", stdin="two\nlines\n").out == "1:TWO\nLINES\n"


def test_generate_as_json(vox, voice: Voice) -> None:
    done = vox("generate", "m", "hé", "--json")
    told = json.loads(done.out)
    assert told.pop("seconds") >= 0
    assert told == {
        "model": "m",
        "prompt": "hé",
        "answer": "1:HÉ",
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "finish_reason": "stop",
        "seed": 0,
    }


def test_generate_gives_several_answers(vox, voice: Voice) -> None:
    asked = ("generate", "m", "hi", "-n", 2)
    warm = (*asked, "--temperature", 1, "--stop", "a", "--stop", "b", "--top-k", 5)
    assert vox(*warm).out == "1:HI\n1:HI again\n"
    lines = vox(*warm, "--json").out.splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["1:HI", "1:HI again"]
    assert voice.calls[0][1].stop == ("a", "b")
    refused = vox(*asked)
    assert (refused.code, refused.out) == (2, "")
    assert "greedy decoding gives the same answer every time" in refused.err


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "one"}, {"messages": [*talk, {"role": "user", "content": "two"}]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_generate_answers_a_file_in_order(vox, voice: Voice, prompts: Path) -> None:
    done = vox("generate", "m", "--file", prompts, "--temperature", 1, "-n", 2)
    assert done.code == 0
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert lines[0] == {
        "row": 1,
        "index": 0,
        "answer": "1:ONE",
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "finish_reason": "stop",
        "seed": 0,
    }
    assert [line["answer"] for line in lines[1:]] == [
        "1:ONE again",
        "3:TWO again again",
        "3:TWO again again again",
    ]
    assert "4/4 answers" in done.err


def test_generate_continues_a_file_of_answers(vox, voice: Voice, prompts: Path) -> None:
    out = prompts.with_name("answers.jsonl")
    command = ("generate", "m", "--file", prompts, "--out", out)
    done = vox(*command)
    assert (done.code, done.out) == (0, f"answers  {out}\n")
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    again = vox(*command)
    assert again.code == 0
    assert "1/2 answers are there from an earlier call" in again.err
    assert out.read_bytes() == whole
    other = vox(*command, "--seed", 1)
    assert other.code == 2
    assert "VOX-O001" in other.err


def test_a_bad_file_of_prompts_is_refused_before_the_model_is_loaded(vox, voice, prompts) -> None:
    prompts.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    done = vox("generate", "m", "--file", prompts)
    assert (done.code, done.out, voice.calls) == (2, "", [])
    assert f"{prompts}, line 2" in done.err


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("hi", "--file", "prompts.jsonl"), "C004"),
        (("hi", "--out", "answers.jsonl"), "C004"),
        (("--file", "prompts.jsonl", "--out", "prompts.jsonl"), "O004"),
        (("--file", "nowhere.jsonl"), "D001"),
        (("--file", "prompts.jsonl", "--out", "taken"), "O002"),
        (("--prompt", "hi"), "C006"),
    ],
)
def test_wrong_uses_of_generate(vox, voice, prompts, monkeypatch, flags, code) -> None:
    monkeypatch.chdir(prompts.parent)
    Path("taken").mkdir()
    done = vox("generate", "m", *flags)
    assert (done.code, done.out, voice.calls) == (2, "", [])
    assert f"error[VOX-{code}]" in done.err
    if code == "C006":
        assert "the prompt has no flag" in done.err


@pytest.mark.parametrize(("prompt", "stdin"), [(" ", ""), ("-", "\n")])
def test_an_empty_prompt_is_refused(vox, voice: Voice, prompt: str, stdin: str) -> None:
    done = vox("generate", "m", prompt, stdin=stdin)
    assert (done.code, done.out, voice.calls) == (2, "", [])
    assert "the prompt is empty" in done.err


# --- model, backend -------------------------------------------------------------------------------


def test_model_list(vox) -> None:
    entries = load_catalog().models
    done = vox("model", "list")
    table, about = done.out.split("\n\n")
    assert [line.split()[0] for line in table.splitlines()] == ["id", *entries]
    row = next(line for line in table.splitlines() if line.startswith("llama-3.2-1b-instruct"))
    assert re.split("  +", row)[1:] == [
        "1.2B",
        "2.5 GB",
        "llama3.2",
        "hub meta-llama/Llama-3.2-1B-Instruct, gated",
        "chat",
    ]
    assert "hub: nothing is pinned" in about
    listed = json.loads(vox("model", "list", "--json").out)
    assert [entry["sha256"] for entry in listed] == [entry.sha256 for entry in entries.values()]


@pytest.mark.usefixtures("_told_at_once")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_model_pull(vox, monkeypatch, flags) -> None:
    def resolve(reference, *, progress):
        progress("downloading", 10**8, 10**8)
        return LocalModel(Path("cache/m"), reference, "abc", "Apache-2.0", "llama")

    monkeypatch.setattr("vox_core.cli.model.resolve", resolve)
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
            "description": "chat; the default",
        }
    else:
        assert f"sha256       {sha256}\n" in done.out
        assert "path         cache/m\n" in done.out


def test_model_pull_says_when_nothing_is_pinned(vox, monkeypatch) -> None:
    found = LocalModel(Path("cache/m"), "Qwen/Qwen3-0.6B", "abc", "Apache-2.0", "qwen3")
    monkeypatch.setattr("vox_core.cli.model.resolve", lambda reference, *, progress: found)
    done = vox("model", "pull", "qwen3-0.6b")
    assert "note: nothing is pinned" in done.err
    assert "sha256" not in done.out


def test_model_pull_of_an_unknown_model(vox) -> None:
    done = vox("model", "pull", "smollm2-135")
    assert (done.code, done.out) == (2, "")
    assert "did you mean smollm2-135m" in done.err


VERDICTS = (
    Verdict("cpu", "0.1.0", "vox-ml-cpu", "available", "2 cores"),
    Verdict("longer", "1", "other", "broken", "no manifest"),
)


def test_backend_list(vox, monkeypatch) -> None:
    monkeypatch.setattr(Seen, "verdicts", lambda *_: VERDICTS)
    assert vox("backend", "list").out.splitlines() == [
        "cpu     0.1.0  available  2 cores",
        "longer  1      broken     no manifest",
    ]
    listed = json.loads(vox("backend", "list", "--json").out)
    assert [each["status"] for each in listed] == ["available", "broken"]


def test_backend_list_without_backends(vox, monkeypatch) -> None:
    monkeypatch.setattr(Seen, "verdicts", lambda *_: ())
    done = vox("backend", "list")
    assert (done.code, done.out) == (0, "")
    assert "vox plugin install cpu" in done.err
    assert vox("backend", "list", "--json").out == "[]\n"
