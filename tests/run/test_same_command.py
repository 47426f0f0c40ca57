"""`--resume auto` and `--allow-change`, locks, and files that change under a run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.run.interrupted import assert_same_run, cut_after, killed, resumed
from tests.run.lines import read
from vox_core.config import TrainSettings, load_settings, reading, validate
from vox_core.contract import CheckpointWritten, Notice, StepDone
from vox_core.errors import ConfigError, InputError
from vox_core.run import folder
from vox_core.run.run_plan import plan_run
from vox_core.run.session import Session
from vox_core.run.train import train


@pytest.fixture
def asked(tiny, settings):
    """`asked(**given)` -> `--resume auto` with five steps, a checkpoint after each."""
    return lambda **given: settings(tiny("llama"), resume="auto", save_every=1, **given)


def plan_of(run) -> dict:
    return json.loads((run / "plan.json").read_text())


# --- the same command again -----------------------------------------------------------------------


def test_the_same_command_begins_goes_on_and_is_content(asked, settings, tiny, tmp_path):
    whole = train(settings(tiny("llama"), out=tmp_path / "whole")).run
    command = asked()
    killed(command, cut_after(2, CheckpointWritten))
    ready = plan_run(command, only_planned=True)
    assert ready.contract.total_steps == 5
    report = train(command)
    assert report.steps == 5
    assert_same_run(report.run, whole)
    before = {path: path.stat().st_mtime_ns for path in report.run.rglob("*")}
    told = []
    again = train(command, observe=told.append)
    assert (again.run, again.stopped, again.steps) == (report.run, False, 5)
    assert [e.message for e in told if isinstance(e, Notice)] == [
        "reading the model and the data …",
        "the run has finished already (5 of 5 steps); there is nothing to do",
    ]
    assert {path: path.stat().st_mtime_ns for path in report.run.rglob("*")} == before


@pytest.mark.parametrize(
    "left", [(), ("preflight.json",), (".tmp-plan.json-0123456789ab", ".lock")]
)
def test_what_died_before_its_plan_is_begun(asked, left):
    command = asked()
    command.out.mkdir()
    for name in left:
        (command.out / name).touch()
    assert train(command).steps == 5
    assert not list(command.out.glob(".tmp-*"))


def test_what_died_before_its_first_checkpoint_begins_again(asked, settings, tiny, tmp_path):
    whole = train(settings(tiny("llama"), out=tmp_path / "whole", save_every=1)).run
    command = asked()
    killed(command, cut_after(1))
    assert train(command).steps == 5
    assert_same_run(command.out, whole)


def test_a_folder_of_somebody_else_is_left_alone(asked):
    command = asked()
    command.out.mkdir()
    (command.out / "mine").write_text("precious")
    with pytest.raises(InputError) as caught:
        train(command)
    assert caught.value.code == "VOX-A001"
    assert [path.name for path in command.out.iterdir()] == ["mine"]


def test_another_command_is_not_the_same(asked):
    """What is left out is the default again, not what the run began with."""
    command = asked()
    killed(command, cut_after(2, CheckpointWritten))
    given = command.model_dump(include=command.model_fields_set - {"lr"})
    with pytest.raises(InputError) as caught:
        train(validate(TrainSettings, {**given, "rank": 8}))
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["--rank", "--lr"]


def test_auto_needs_a_folder(asked):
    with pytest.raises(ConfigError, match="does not know which run"):
        train(asked(out=None))


def test_auto_is_a_word_and_not_a_path(tmp_path):
    (tmp_path / "vox.toml").write_text('[train]\nresume = "auto"\nout = "auto"\n')
    with reading(tmp_path / "vox.toml"):
        read = load_settings(TrainSettings, {})
    assert (read.resume, read.out) == ("auto", tmp_path / "auto")
    named = load_settings(TrainSettings, {"resume": "runs/a"})
    assert str(named.resume) == os.path.join("runs", "a")  # noqa: PTH118


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("2h", 7200), ("1h30m", 5400), ("45s", 45), ("12", 12)]
)
def test_durations(text, seconds):
    assert validate(TrainSettings, {"max_time": text}).max_time == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "1d", "m"])
def test_what_is_no_duration(text):
    with pytest.raises(ConfigError, match="not valid"):
        validate(TrainSettings, {"max_time": text})


# --- what may change ------------------------------------------------------------------------------


def test_what_may_change_has_to_be_said(asked):
    killed(asked(), cut_after(2, CheckpointWritten))
    with pytest.raises(InputError) as caught:
        train(validate(TrainSettings, {"resume": asked().out, "lr": 1e-3}))
    assert "--allow-change lr would" in caught.value.remedy
    with pytest.raises(InputError) as caught:
        train(validate(TrainSettings, {"resume": asked().out, "max_steps": 9}))
    assert "--allow-change max-steps would" in caught.value.remedy
    with pytest.raises(InputError) as caught:
        train(validate(TrainSettings, {"resume": asked().out, "lr": 1e-3, "rank": 8}))
    assert "--allow-change" not in caught.value.remedy  # the rank would still be another
    given = {"resume": asked().out, "lr": 1e-3, "allow_change": "lr"}
    with pytest.raises(InputError) as caught:
        train(validate(TrainSettings, {**given, "rank": 8}))
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["--rank"]
    assert "--allow-change" not in caught.value.remedy
    told = []
    train(validate(TrainSettings, given), observe=told.append)
    (warning,) = [e for e in told if isinstance(e, Notice) and "another contract" in e.message]
    assert warning.level == "warning"
    assert "--lr: 0.01 when it began, 0.001 now" in warning.message
    lines = [*read(asked().out / "telemetry.jsonl")]
    assert any(warning.message in line.get("message", "") for line in lines)


def test_a_change_is_kept_and_the_next_resume_needs_no_leave(asked):
    killed(asked(), cut_after(2, CheckpointWritten))
    began = plan_of(asked().out)["digest"]
    given = {"resume": asked().out, "lr": 1e-3, "allow_change": ["lr", "warmup"]}
    told = []
    killed(validate(TrainSettings, given), cut_after(3, CheckpointWritten))
    resumed(asked().out, told.append)
    assert {step.lr <= 1e-3 for step in told if isinstance(step, StepDone)} == {True}
    now = plan_of(asked().out)
    (change,) = now["changes"]
    assert (change["after_step"], change["contract"]) == (2, began)
    assert now["digest"] != began
    assert "allow_change" not in now["settings"]


def test_a_finished_run_is_lengthened_where_that_is_allowed(asked):
    train(asked())
    given = {"resume": asked().out, "max_steps": 7}
    with pytest.raises(InputError, match="finished already"):
        train(validate(TrainSettings, given))
    report = train(validate(TrainSettings, {**given, "allow_change": ["max-steps"]}))
    assert (report.steps, report.total_steps) == (7, 7)


@pytest.mark.parametrize("name", ["model", "data", "rank", "seed", "batch-size"])
def test_what_never_may_change(name):
    with pytest.raises(ConfigError) as caught:
        validate(TrainSettings, {"allow_change": [name]})
    assert "'lr'" in caught.value.faults[0]


# --- files that change ----------------------------------------------------------------------------


def test_a_data_file_that_changed_is_named(asked, data):
    killed(asked(valid=data / "valid.jsonl"), cut_after(2, CheckpointWritten))
    with (data / "train.jsonl").open("a") as file:
        file.write('\n{"prompt": "More?", "completion": "One."}')
    (data / "valid.jsonl").write_text('{"prompt": "Other?", "completion": "Yes."}\n')
    with pytest.raises(InputError) as caught:
        resumed(asked().out)
    for name in ("train.jsonl", "valid.jsonl"):
        assert f"{data / name} has changed since the run began" in caught.value.faults


def test_the_same_rows_elsewhere_are_the_same_data(asked, data, tmp_path):
    killed(asked(), cut_after(2, CheckpointWritten))
    moved = shutil.copytree(data, tmp_path / "moved")
    given = {"resume": asked().out, "data": [moved]}
    assert train(validate(TrainSettings, given)).steps == 5


def test_a_model_file_that_changed_is_named(asked, settings, tiny, tmp_path):
    base = shutil.copytree(tiny("llama"), tmp_path / "base")
    command = settings(base, save_every=1)
    killed(command, cut_after(2, CheckpointWritten))
    weights = base / "model.safetensors"
    weights.write_bytes((tiny("llama", seed=1) / "model.safetensors").read_bytes())
    with pytest.raises(InputError) as caught:
        resumed(command.out)
    assert f"{weights} has changed since the run began" in caught.value.faults
    assert any(fault.startswith("--model: the weights") for fault in caught.value.faults)


def test_a_file_that_changes_under_a_run_is_told_once(asked, data):
    """The run has its rows already, and its digest is theirs; a resume will be refused."""
    told = []

    def observe(event):
        told.append(event)
        if isinstance(event, StepDone) and event.step == 2:
            (data / "train.jsonl").write_text('{"prompt": "Other?", "completion": "Yes."}\n')

    report = train(asked(), observe=observe)
    assert report.steps == 5
    (warning,) = [e.message for e in told if isinstance(e, Notice) and "changed" in e.message]
    assert warning.startswith(f"{data / 'train.jsonl'} has changed since it was read")


# --- whose folder it is ---------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from vox_core.run.folder import RunFolder, locked
with locked(RunFolder(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder():
    """`holder(run)` -> another process that works in the folder."""
    started = []

    def start(run) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(run)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_second_process_is_told_who_the_first_is(asked, settings, tiny, holder):
    killed(asked(), cut_after(2, CheckpointWritten))
    process = holder(asked().out)
    out = asked().out
    who = f"process {process.pid} on {socket.gethostname()}, since 20"
    again = validate(TrainSettings, {"resume": out})
    for command in (again, asked(), settings(tiny("llama"))):
        with pytest.raises(InputError) as caught:
            train(command)
        assert caught.value.code == "VOX-O003"
        assert caught.value.found.startswith(who)
        assert ("--out" in caught.value.remedy) == (command.resume is None)


def test_the_lock_of_a_dead_process_is_taken_over(asked, holder):
    killed(asked(), cut_after(2, CheckpointWritten))
    process = holder(asked().out)
    process.kill()
    process.wait()
    told = []
    assert resumed(asked().out, told.append).steps == 5
    (taken,) = [e.message for e in told if isinstance(e, Notice) and "giving the run" in e.message]
    assert f"process {process.pid} on" in taken
    assert not (asked().out / ".lock.json").exists()


def test_runs_without_a_name_that_begin_in_one_second_have_two(
    settings, tiny, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder, "time", SimpleNamespace(strftime=lambda _: "20260102-030405"))
    asked = settings(tiny("llama"), out=None, max_steps=1)
    first = f"runs/{tiny('llama').name}-20260102-030405"
    ready = plan_run(asked)
    assert str(ready.run.path) == first
    assert [str(train(asked).run) for _ in range(3)] == [first, f"{first}-2", f"{first}-3"]
    with Session.open(
        ready, lambda _: None, 0.0
    ) as session:  # begun by others since it was planned
        assert str(session.plan.run.path) == f"{first}-4"


def test_a_lock_says_nothing_of_a_process_that_gave_it_back(asked):
    killed(asked(), cut_after(2, CheckpointWritten))
    told = []
    resumed(asked().out, told.append)
    assert not [e for e in told if isinstance(e, Notice) and "giving the run" in e.message]


def test_a_folder_that_cannot_be_written_is_told(asked, monkeypatch):
    killed(asked(), cut_after(2, CheckpointWritten))
    from filelock import FileLock

    def refused(_lock):
        raise PermissionError(13, "Permission denied", str(asked().out / ".lock"))

    monkeypatch.setattr(FileLock, "acquire", refused)
    fresh = asked().model_copy(update={"resume": None, "out": asked().out / "other"})
    for command in (fresh, asked(), validate(TrainSettings, {"resume": asked().out})):
        with pytest.raises(InputError) as caught:
            train(command)
        assert caught.value.code == "VOX-O002"
        assert ("--out" in caught.value.remedy) == (command.resume is None)


def test_a_clock_that_goes_back_changes_nothing_but_stamps(
    asked, settings, tiny, tmp_path, monkeypatch
):
    whole = train(settings(tiny("llama"), out=tmp_path / "whole", save_every=1)).run
    now = iter(range(2_000_000_000, 0, -3600))
    monkeypatch.setattr("time.time", lambda: float(next(now)))
    report = train(asked(max_time="1h"))
    assert (report.steps, report.stopped) == (5, False)
    assert report.seconds > 0
    assert_same_run(report.run, whole)
    lines = [*read(report.run / "telemetry.jsonl")]
    assert all(line["seconds"] >= 0 for line in lines if "seconds" in line)
