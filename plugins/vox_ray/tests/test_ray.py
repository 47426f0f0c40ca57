"""The launcher ray: settings, errors and records; with Ray itself where it is installed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vox_core.config import TrainSettings, validate
from vox_core.contract import LaunchJob
from vox_core.errors import BackendError, ConfigError, OutputError, StorageError, TrainingError
from vox_ray import launch, worker
from vox_ray.worker import SIGNALS, Lost, Task, Unseen, attempts, records, run_rank
from vox_testing.tiny import make_model

STDERR = "rank-0.log"


def settings(**given: object) -> TrainSettings:
    return validate(TrainSettings, {"model": "m", "data": ["d.jsonl"], **given})


def task(folder: Path, *arguments: str, processes: int = 1) -> Task:
    (folder / SIGNALS).touch()
    again = ("no-such-command",)
    resume = f"vox train --resume {folder / 'run'}"
    return Task(arguments, again, processes, folder / "run", folder, folder, 1, resume)


def attempt(folder: Path, number: int = 0) -> Path:
    made = folder / f"attempt-{number}"
    made.mkdir()
    return made


def record(folder: Path, rank: int, code: str | None = None, **more: object) -> None:
    """As a rank leaves it."""
    kind = "StorageError" if code == "VOX-S001" else "TrainingError"
    error = code and {"kind": kind, "code": code, "what": f"of {rank}", "remedy": "r"}
    (folder / f"rank-{rank}.json").write_text(
        json.dumps({"exit": 1 if code else 0, "error": error, **more})
    )


@pytest.mark.parametrize(
    ("nodes", "processes", "given", "threads"),
    [
        ([2], 2, "", 1),
        ([8], 2, "", 4),
        ([4, 12], 2, "", 6),  # both on the second node
        ([8, 8], 2, "", 8),
        ([0, 3], 1, "", 3),
        ([8], 2, "3", 3),
    ],
)
def test_each_rank_gets_the_most_cpus_that_all_can_have(nodes, processes, given, threads):
    assert launch.threads_for(nodes, processes, given) == threads


@pytest.mark.parametrize(
    ("nodes", "given", "expected", "remedy"),
    [
        ([1, 1], "", "1 for each", "--processes 2,"),
        ([4, 1], "2", "2 for each process (OMP_NUM_THREADS)", "--processes 2,"),
        ([0], "", "1 for each", "add nodes"),
    ],
)
def test_too_few_cpus(nodes, given, expected, remedy):
    with pytest.raises(ConfigError, match="too few CPUs") as raised:
        launch.threads_for(nodes, 3, given)
    assert expected in str(raised.value.expected)
    assert remedy in raised.value.remedy


def test_processes_that_are_started_again_need_the_run_by_name():
    job = LaunchJob(("train",), 2, "ray")
    with pytest.raises(ConfigError, match="find their run"):
        launch.vox_launch(job, settings())


def test_without_ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    job = LaunchJob(("train",), 2, "ray")
    with pytest.raises(BackendError, match="needs Ray Train") as raised:
        launch.vox_launch(job, settings(out=tmp_path / "run"))
    assert "vox plugin install ray" in raised.value.remedy
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("address", ["ray://localhost:10001", "localhost", "127.0.0.1:1"])
def test_an_address_that_does_not_answer(address):
    with pytest.raises((ValueError, OSError), match=r"not HOST:PORT|refused"):
        launch._require_answer(address)


def test_later_attempts_resume(tmp_path):
    """The first has the command's arguments, any other those of a run that goes on."""
    given = task(tmp_path, "--version")
    for number in range(2):
        run_rank(given, 0, attempt(tmp_path, number), together=True)
    first, second = (records(folder, 1)[0] for folder in attempts(tmp_path))
    assert first == {"exit": 0, "error": None}
    assert second["exit"] == 2
    assert "vox " in (tmp_path / "attempt-0/rank-0.out").read_text()


def test_a_rank_that_dies_is_recorded_and_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    given, folder = task(tmp_path, "--version"), attempt(tmp_path)
    with pytest.raises(Lost):
        run_rank(given, 0, folder, together=True)
    with pytest.raises(TrainingError, match="rank 0 of the run has died") as raised:
        launch._result(given, None, max_restarts=3)
    assert "exit code 1; after 3 restarts" in str(raised.value.found)


def test_a_rank_that_lost_one_with_an_error_is_not_started_again(tmp_path, monkeypatch):
    """The error would only come again."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    given, folder = task(tmp_path, "--version", processes=2), attempt(tmp_path)
    record(folder, 1, "VOX-S001")
    run_rank(given, 0, folder, together=True)
    assert worker.codes(records(folder, 2)) == {"VOX-T006", "VOX-S001"}


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """Instead of Python, a program that never beats."""
    (tmp_path / "hang").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "hang").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "hang"))


@pytest.mark.usefixtures("hanging")
def test_a_rank_is_ended_by_another_s_error(tmp_path, monkeypatch):
    """And recorded, so that nobody waits for it."""
    monkeypatch.setattr(worker, "GRACE", 0.1)
    given, folder = task(tmp_path, "--version", processes=2), attempt(tmp_path)
    record(folder, 1, "VOX-S001")
    run_rank(given, 0, folder, together=True)
    assert records(folder, 2)[0] == {"exit": 1, "error": None}


@pytest.mark.usefixtures("hanging")
def test_a_rank_that_hangs_is_killed_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr("vox_plan.launch.SILENCE", 0.2)
    folder = attempt(tmp_path)
    with pytest.raises(Lost):
        run_rank(task(tmp_path, "--version"), 0, folder, together=True)
    found = records(folder, 1)[0]
    assert found["silent"] > 0.2
    assert found["error"]["what"] == "rank 0 of the run has stopped responding"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_end_30_seconds_after_the_last_sign_of_life(tmp_path, monkeypatch, rank):
    """They have less time after a rank that hung, and after rank 0, which alone writes."""
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: 15.0))
    record(tmp_path, rank, "VOX-T006", died=True, silent=15.0)
    assert worker._end_of_others(records(tmp_path, 2)) == 15 + (10 if rank else 5)


def test_signals_before_the_start_start_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    given = task(tmp_path, "--version")
    launch._Signals(tmp_path).send(signal.SIGINT)
    run_rank(given, 0, attempt(tmp_path), together=True)
    assert launch._result(given, None, max_restarts=3).exit_code == 130


@pytest.mark.parametrize(
    ("codes", "died", "rank"),
    [
        (["VOX-T006", "VOX-T006"], 1, 1),
        (["VOX-T006", "VOX-S001"], None, 1),
        (["VOX-S001", "VOX-T006"], 1, 1),
        (["VOX-T006", None], None, 0),
    ],
)
def test_the_rank_to_blame(tmp_path, codes, died, rank):
    for number, code in enumerate(codes):
        record(tmp_path, number, code, **({"died": True} if number == died else {}))
    found = launch.culprit(records(tmp_path, len(codes)))
    assert found
    assert (found[0], found[1].what) == (rank, f"of {rank}")


def test_the_error_of_one_rank_names_it(tmp_path):
    given, folder = task(tmp_path, processes=2), attempt(tmp_path)
    record(folder, 0, "VOX-T006")
    record(folder, 1, "VOX-S001")
    with pytest.raises(StorageError) as raised:
        launch._result(given, None, max_restarts=3)
    assert raised.value.where == "rank 1"


class Failure(Exception):
    """As Ray's: the workers' exceptions by rank."""

    def __init__(self, cause: Exception) -> None:
        self.worker_failures = {1: cause}


def test_a_worker_that_does_not_see_the_folder(tmp_path):
    cause = Unseen("node-7", f"{tmp_path}/.vox-ray-x")
    with pytest.raises(OutputError, match="does not see") as raised:
        launch._result(task(tmp_path), Failure(cause), max_restarts=3)
    assert raised.value.where == str(tmp_path)
    assert "node-7" in str(raised.value.found)


def test_workers_that_ray_lost(tmp_path):
    cause = RuntimeError("the actor died:\n  SIGKILL")
    with pytest.raises(TrainingError, match="more often") as raised:
        launch._result(task(tmp_path), Failure(cause), max_restarts=3)
    assert raised.value.found == "3 restarts; the last time: the actor died: SIGKILL"
    assert raised.value.where == "rank 1"


def test_output_of_every_attempt_is_shown_once(tmp_path, capsysbinary):
    given = task(tmp_path)
    shown = launch._Shown(given, 3)
    shown.more()
    first = attempt(tmp_path)
    (first / STDERR).write_bytes(b"one")
    shown.more()
    (first / STDERR).write_bytes(b"one two\n")
    (attempt(tmp_path, 1) / STDERR).write_bytes(b"three\n")
    shown.more()
    shown.more()
    again = b"a worker of Ray was lost: restart 1 of 3, from the newest checkpoint\n"
    assert capsysbinary.readouterr().err == b"one two\n" + again + b"three\n"


def test_why_ranks_are_started_again_is_said_once_all_have_ended(tmp_path, capsys):
    """Not only when Ray has started them; and which worker was lost, if Ray lost one."""
    given, first = task(tmp_path, processes=2), attempt(tmp_path)
    shown = launch._Shown(given, 2)
    record(first, 0, "VOX-T006")
    shown.more()
    assert capsys.readouterr().err == ""
    record(first, 1, "VOX-T006", died=True)
    shown.more()
    shown.more()
    assert capsys.readouterr().err.startswith("of 1 (None): None: restart 1 of 2")
    attempt(tmp_path, 1)
    worker.note_lost(tmp_path, {0: Lost(), 1: RuntimeError("it hangs\n at length")})
    shown.more()
    assert capsys.readouterr().err == (
        "the worker of rank 1 was lost (it hangs): restart 2 of 2, from the newest checkpoint\n"
    )
    attempt(tmp_path, 2)
    worker.note_lost(tmp_path, {0: RuntimeError("it hangs")})
    shown.more()
    assert "rank 0 was lost (it hangs): no restart is left\n" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks through /proc")
@pytest.mark.parametrize(
    ("stopped", "said"),
    [
        ("killed rank", "rank 1 of the run has died"),
        ("stopped rank", "rank 1 of the run has stopped responding"),
        ("stopped worker", "the worker of rank 1 was lost"),
    ],
)
def test_a_lost_rank_is_replaced(tmp_path: Path, stopped: str, said: str) -> None:
    """On a cluster of its own; the adapter is that of one process, and nothing is left."""
    pytest.importorskip("ray.train", reason="needs the package ray[train]")
    model = make_model("llama", tmp_path / "model")
    rows = [{"prompt": "word " * (1 + n % 5), "completion": f"answer {n}"} for n in range(24)]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    command = [
        *(sys.executable, "-m", "vox_core.cli", "train", "--model", model, "--data", data),
        *("--backend", "cpu", "--allow-cpu", "--dtype", "fp32", "--tune", "ignore"),
        *("--batch-size", "6", "--micro-batch-tokens", "64", "--dropout", "0.1"),
        *("--max-steps", "300", "--save-every", "5"),
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
    subprocess.run([*map(str, command), "--out", one], check=True, env=environ)
    run = subprocess.Popen(
        [*map(str, command), "--out", two, "--processes", "2", "--launcher", "ray"],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not [*two.glob("checkpoints/step-*")]:
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        lost = rank_of(tmp_path, 1)
        if "worker" in stopped:
            lost = int(Path(f"/proc/{lost}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(lost, signal.SIGKILL if "killed" in stopped else signal.SIGSTOP)
        _, log = run.communicate()
    finally:
        run.kill()
    assert run.returncode == 0, log
    assert said in log
    assert "restart 1 of 3" in log
    adapters = [(each / "adapter_model.safetensors").read_bytes() for each in (one, two)]
    assert adapters[0] == adapters[1]
    assert {each.name for each in tmp_path.iterdir()} == {"one", "two", "train.jsonl", "model"}


def rank_of(folder: Path, rank: int) -> int:
    """The process of a rank whose arguments name the folder."""
    for each in Path("/proc").glob("[0-9]*"):
        try:
            here = f"{folder}/.vox-ray".encode() in (each / "cmdline").read_bytes()
            if here and re.search(rb"\0RANK=%d\0" % rank, (each / "environ").read_bytes()):
                return int(each.name)
        except OSError:
            continue
    raise AssertionError("no such rank")
