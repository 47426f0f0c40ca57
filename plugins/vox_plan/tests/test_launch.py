"""Ranks of a launcher; libs/vox_torch/tests/test_ranks.py has them train."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from vox_core.contract import LaunchJob
from vox_core.errors import DataError
from vox_plan import launch as launching
from vox_plan.launch import launch


@pytest.mark.parametrize("launcher", ["torchrun", "mlx"])
def test_a_launched_command_ends_with_its_exit_code(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert launch(LaunchJob(("--version",), 2, launcher)).exit_code == 0
    assert not [*tmp_path.iterdir()]


def test_a_closed_terminal_counts_once():
    """It sends SIGHUP twice: from the shell, and from the system when the shell has ended."""
    sent = []
    with launching.passed_on([SimpleNamespace(send=sent.append)]) as second:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert second() is None
        signal.raise_signal(signal.SIGTERM)
        assert second() is not None
    assert sent == [signal.SIGHUP, signal.SIGTERM]


def test_a_rank_that_computes_does_not_hang(tmp_path, monkeypatch):
    """Although its thread that beats cannot run; until it uses no CPU time for 15 seconds."""
    now, worked = 0.0, "1 0"
    with monkeypatch.context() as patched:
        patched.setattr(launching, "time", SimpleNamespace(monotonic=lambda: now))
        patched.setattr(launching, "_cpu_time", lambda _: worked)
        rank = launching.Rank(0, LaunchJob(("--version",), 1, "torchrun"), tmp_path, {}, shown=True)
        rank.send(signal.SIGSTOP)  # before it beats
        found = []
        for now, worked in ((14.0, "2 0"), (28.0, "3 0"), (42.0, "3 0"), (44.0, "3 0")):  # noqa: B007
            found.append(rank.hangs())
        rank.close()
    assert found == [False, False, False, True]


def test_the_last_words_of_a_rank_are_whole_lines(tmp_path):
    job = LaunchJob(("--version",), 1, "torchrun", "vox train --resume runs/a --processes 2")
    rank = launching.Rank(1, job, tmp_path, {}, shown=False)
    rank.process.kill()
    rank.process.wait()
    rank.output.write_text("one\ntwo\nstep 1\rstep 2\nan error\n")
    error = rank.error(False)
    rank.close()
    assert error.found == "ended by SIGKILL; its last words: step 1\nstep 2\nan error"
    assert error.remedy.startswith("continue with vox train --resume runs/a --processes 2, on any")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_time_of_a_process():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        first = launching._cpu_time(process.pid)
        end = time.monotonic() + 60
        while launching._cpu_time(process.pid) == first and time.monotonic() < end:
            pass
        process.kill()
    assert time.monotonic() < end


def test_ranks_start_where_no_affinity_is_known(monkeypatch):
    """As on macOS."""
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert launch(LaunchJob(("--version",), 1, "torchrun")).exit_code == 0


@pytest.mark.parametrize(("dead", "ended"), [(0, 20), (1, 25)])
def test_nobody_waits_long_for_a_rank_that_hung(dead, ended, monkeypatch):
    """Only rank 0 may have a checkpoint to finish; the others may wait for a peer forever. The time
    begins with the last sign of life of the rank that failed, not with that of one that is done."""
    clock = [15.0]
    counted = {"monotonic": lambda: clock[0], "sleep": lambda _: clock.append(clock.pop() + 1)}
    monkeypatch.setattr(launching, "time", SimpleNamespace(**counted))
    done = SimpleNamespace(alive=False, failed=False, record={"exit": 0}, seen=-100.0)
    ranks = [
        SimpleNamespace(alive=number != dead, failed=number == dead, record=None, seen=0.0)
        for number in range(2)
    ]
    launching._wait_for_others([*ranks, done], ranks[dead])
    assert clock == [ended]


def test_an_error_that_every_rank_finds_is_the_run_s(tmp_path):
    missing = str(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="data file") as raised:
        launch(LaunchJob(("train", "--data", missing), 2, "torchrun"))
    assert str(raised.value.where).startswith(missing)


def test_a_rank_imports_nothing_from_the_working_directory(tmp_path, monkeypatch):
    """It may be a repository of somebody else's."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert launch(LaunchJob(("--version",), 1, "torchrun")).exit_code == 0
