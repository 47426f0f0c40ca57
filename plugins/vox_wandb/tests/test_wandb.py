"""What the tracker writes offline, read back from W&B's own files."""

from __future__ import annotations

import json
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from tests.run.lines import read as read_lines
from wandb.proto.wandb_internal_pb2 import Record

import vox_wandb
from vox_core.api.tracking import Tracker
from vox_core.config import TrainSettings, validate
from vox_core.contract import (
    CheckpointWritten,
    Evaluation,
    Event,
    Notice,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)
from vox_core.host.observers import Observers
from vox_core.run.train import train
from vox_testing.tiny import make_model
from vox_wandb import Curves, _prepare

STEP = "train/global_step"


@pytest.fixture(autouse=True)
def _without_the_users_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Offline, with no settings or key of the user's, and with a process of W&B's own."""
    for name in [each for each in os.environ if each.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["vox", "a path"])
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "of wandb"))
    wandb.teardown()  # the settings are read once for each process of W&B's
    yield
    wandb.teardown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder, as it is when the run starts."""
    folder = tmp_path / "my run"
    folder.mkdir()
    contract = {"objective": {"name": "grpo"}, "optimizer": {"lr": 0.5}, "model": {"revision": "x"}}
    (folder / "plan.json").write_text(json.dumps({"contract": contract}))
    return folder


def start(run: Path, first: int = 1) -> RunStart:
    return RunStart(str(run), "m", "cpu", "a CPU", "fp32", "0" * 64, first, 4, 8, 99, 40)


def step(number: int, loss: float) -> StepDone:
    return StepDone(number, loss, 1e-4, 0.5, 100, 40, 0.5, memory=2**33)


def tell(*events: Event) -> None:
    """Send events as in a process that then ends: W&B's own has written its files by then."""
    observer = Tracker(Curves, _prepare)
    for event in events:
        observer.vox_event(event)
    wandb.teardown()


def records(file: Path) -> Iterator[Any]:
    """Records of a `.wandb` file: 7 bytes, then the log format of LevelDB, blocks of 32 KiB."""
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def rows(file: Path) -> list[dict[str, float]]:
    """What was logged, without W&B's own columns."""
    logged = [r.history.item for r in records(file) if r.HasField("history")]
    row = [{i.key or i.nested_key[0]: json.loads(i.value_json) for i in items} for items in logged]
    return [{k: v for k, v in each.items() if not k.startswith("_")} for each in row]


def of_run(file: Path) -> Any:
    return next(record.run for record in records(file) if record.HasField("run"))


def exit_code(file: Path) -> int:
    (code,) = [record.exit.exit_code for record in records(file) if record.HasField("exit")]
    return int(code)


def test_each_number_is_a_scalar_of_its_step(run: Path) -> None:
    events = [Notice("ready"), start(run), Validation(0, 5.0), step(1, 4.0), step(2, 3.5)]
    checkpoint = CheckpointWritten(1, "p", 0.25)  # written while the second step was taken
    tell(*events, Evaluation(2, {"eval/sums": 0.75}, "p"), checkpoint, RunEnd(2, "done", 1.0))
    (file,) = files(run)
    numbers = {
        "train/learning_rate": 1e-4,
        "train/gradient_norm": 0.5,
        "train/trained_tokens": 40,
        "train/tokens_per_second": 200,
        "train/memory_bytes": 2**33,
    }
    assert rows(file) == [
        {STEP: 0, "validation/loss": 5.0},
        {STEP: 1, "train/loss": 4.0, **numbers},
        {STEP: 2, "train/loss": 3.5, **numbers},
        {STEP: 2, "eval/sums": 0.75},
        {STEP: 1, "checkpoint/seconds": 0.25},
    ]
    (axis,) = [record.metric for record in records(file) if record.HasField("metric")]
    assert (axis.glob_name, axis.step_metric) == ("*", STEP)


def test_a_run_has_its_folders_name_and_its_contract(run: Path) -> None:
    tell(start(run), step(1, 4.0), RunEnd(1, "done", 1.0))
    told = of_run(files(run)[0])
    assert (told.project, told.display_name) == ("vox", "my run")
    config = {each.key: json.loads(each.value_json) for each in told.config.update}
    assert config["objective"] == {"name": "grpo"} and config["optimizer"] == {"lr": 0.5}
    assert (config["model"], config["contract"], config["total_steps"]) == ("m", "0" * 64, 4)
    assert "run" not in config
    assert not any(record.environment.args for record in records(files(run)[0]))


def test_environment_variables_are_the_settings(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    given = {"PROJECT": "p", "NAME": "n", "RUN_ID": "i", "DIR": str(tmp_path / "elsewhere")}
    for name, value in given.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    tell(start(run), step(1, 4.0), RunEnd(1, "done", 1.0))
    (file,) = files(tmp_path / "elsewhere")
    told = of_run(file)
    assert (told.project, told.display_name, told.run_id) == ("p", "n", "i")
    assert [each.name for each in (run / "wandb").iterdir()] == ["run-id"]


def test_a_resumed_run_goes_on_in_the_same_run(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tell(start(run), step(1, 4.0), step(2, 3.0), RunEnd(2, "stopped", 1.0))
    tell(start(run, first=2), step(2, 3.0), RunEnd(2, "failed", 1.0))
    first, second = files(run)
    assert [row[STEP] for file in (first, second) for row in rows(file)] == [1, 2, 2]
    assert of_run(first).run_id == of_run(second).run_id == (run / "wandb/run-id").read_text()
    assert (exit_code(first), exit_code(second)) == (255, 1)
    assert of_run(second).resume, "or `wandb sync` would replace the first part"
    _, _, command = capfd.readouterr().err.strip().rpartition("upload with: ")
    assert shlex.split(command) == ["wandb", "sync", str(first.parent), str(second.parent)]


def test_a_killed_run_keeps_its_numbers_and_fails(run: Path) -> None:
    script = f"""
from vox_core.contract import RunStart, Validation
from vox_wandb import observer
observer.vox_event(RunStart({str(run)!r}, "m", "b", "d", "fp32", "0", 1, 1, 1, 1, 1))
observer.vox_event(Validation(0, 1.0))
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    (file,) = files(run)
    assert rows(file) == [{STEP: 0, "validation/loss": 1.0}]
    assert exit_code(file) == 1


def test_a_run_without_numbers_leaves_no_folder(run: Path) -> None:
    tell(start(run), Notice("x"), RunEnd(0, "failed", 1.0))
    assert [each.name for each in run.iterdir()] == ["plan.json"]


def test_nor_does_one_with_wandb_disabled(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tell(start(run), step(1, 4.0), RunEnd(1, "done", 1.0))
    assert [each.name for each in run.iterdir()] == ["plan.json"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("key", [None, "0" * 40], ids=["no key", "no server"])
def test_a_run_that_cannot_be_sent_is_written_offline(
    run: Path,
    key: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(vox_wandb, "TIMEOUT_S", 1)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    tell(start(run), step(1, 4.0), RunEnd(1, "done", 1.0))
    (file,) = files(run)
    assert [row["train/loss"] for row in rows(file)] == [4.0]
    why, offline = capfd.readouterr().err.splitlines()
    assert ("connection refused" if key else "No API key configured") in why
    assert offline == "wandb: offline; upload with: " + shlex.join(
        ["wandb", "sync", str(file.parent)]
    )


def test_an_upload_that_takes_too_long_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Slow:
        """A run of `wandb.init` whose server takes its time."""

        id, url, dir = "i", "https://wandb.test/i", str(run / "wandb/run-20260101_000000-i/files")
        offline = disabled = False

        def define_metric(self, name: str, *, step_metric: str) -> None: ...

        def log(self, values: dict[str, float]) -> None: ...

        def finish(self, exit_code: int) -> None:
            raise TimeoutError

    monkeypatch.setattr(wandb, "init", lambda **_: Slow())
    (folder := Path(Slow.dir).parent).mkdir(parents=True)
    (folder / "run-i.wandb").touch()
    tell(start(run), step(1, 4.0), RunEnd(1, "done", 1.0))
    began, ended = capfd.readouterr().err.splitlines()
    assert began == "wandb: https://wandb.test/i"
    assert ended.endswith(shlex.join(["wandb", "sync", "--include-online", str(folder)]))


def test_importing_it_imports_no_wandb_and_running_it_no_torch(run: Path) -> None:
    script = f"""
import sys
from vox_wandb import observer
assert 'wandb' not in sys.modules
from vox_core.contract import RunStart, Validation
observer.vox_event(RunStart({str(run)!r}, "m", "b", "d", "fp32", "0", 1, 1, 1, 1, 1))
observer.vox_event(Validation(0, 1.0))
assert 'wandb' in sys.modules and 'torch' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_through_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its entry point, told in its own process, and equal to the telemetry."""
    monkeypatch.setenv("VOX_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "tensorboard")
    assert "wandb" in [each.id for each in Observers()._listening], "is it installed?"
    rows_ = '{"prompt": "Which?", "completion": "That one."}\n'
    (tmp_path / "train.jsonl").write_text(rows_)
    (tmp_path / "valid.jsonl").write_text(rows_.replace("Which", "Which one"))
    settings = {
        "model": str(make_model("llama", tmp_path / "model")),
        "data": [tmp_path / "train.jsonl"],
        "valid": tmp_path / "valid.jsonl",
        "out": tmp_path / "run",
        "backend": "cpu",
        "dtype": "fp32",
        "max_steps": 3,
    }
    run = train(validate(TrainSettings, settings)).run
    told = list(read_lines(run / "telemetry.jsonl"))
    warned = [line["message"] for line in told if line["event"] == "warning"]
    assert not any("tracker" in message for message in warned)
    (file,) = files(run)
    for tag, event in (("train/loss", "step"), ("validation/loss", "validation")):
        drawn = [(row[STEP], row[tag]) for row in rows(file) if tag in row]
        assert drawn == [(e["step"], pytest.approx(e["loss"])) for e in told if e["event"] == event]
    assert exit_code(file) == 0
