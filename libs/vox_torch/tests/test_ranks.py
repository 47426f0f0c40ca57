"""Runs of several processes through the `vox` command, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from vox_core.cli import root
from vox_core.errors import ConfigError
from vox_testing.tiny import make_model

VOX = (sys.executable, "-m", "vox_core.cli")
QUICK = (
    *("train", "--dtype", "fp32", "--backend", "cpu", "--allow-cpu", "--tune", "ignore"),
    *("--batch-size", "4", "--lr", "0.01"),  # four micro-batches in each step
    *("--micro-batch-tokens", "64", "--schedule", "constant", "--warmup", "0"),
)
ADAPTER = ("--rank", "4", "--alpha", "8", "--dropout", "0.2")
FULL = ("--method", "full", "--lr", "0.001")
PATIENCE = 300


def rows(path: Path, count: int, first: int = 0) -> Path:
    texts = [("word " * (1 + n % 5), f"answer {n} " * (1 + n % 3)) for n in range(first, count)]
    lines = [json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in texts]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def quick(tiny: Callable[..., Path], tmp_path: Path) -> list[str]:
    """A quick run, without its method, length and folder."""
    train, valid = rows(tmp_path / "train.jsonl", 24), rows(tmp_path / "valid.jsonl", 31, 24)
    data = ["--data", str(train), "--valid", str(valid)]
    return [*QUICK, "--model", str(tiny("llama")), *data]


@pytest.fixture
def command(quick: list[str]) -> list[str]:
    """The command of a quick run that trains an adapter, without its length and folder."""
    return [*VOX, *quick, *ADAPTER]


def vox(command: list[object], *more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command), *map(str, more)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def numbers(run: Path) -> list[tuple[int, float]]:
    """Losses of the steps and validations of a run."""
    lines = map(json.loads, (run / "telemetry.jsonl").read_text().splitlines())
    return [
        (each["step"], each["loss"]) for each in lines if each["event"] in ("step", "validation")
    ]


def weights(run: Path) -> bytes:
    return (run / "adapter_model.safetensors").read_bytes()


def answers(run: Path) -> list[bytes]:
    """The samples of both evaluations of a run."""
    return [(run / f"evaluations/step-{step}/eval.jsonl").read_bytes() for step in (0, 2)]


SUITE = """
name = "s"
[[task]]
id = "say"
rows = "valid.jsonl"
scorer = "exact"
sampling = { max-tokens = 2 }
"""
FORKED = """
import json, os, sys
from pathlib import Path
import torch
import vox_torch.ranks
from vox_core.cli import root
from vox_torch.reference_check import Reference

vox_torch.ranks.PIECE = 1000
store, alone, shared = sys.argv[1], *map(json.loads, sys.argv[2:])

held, adamw = [], torch.optim.AdamW
def counting(groups, **settings):
    held.append(sum(each.numel() for group in groups for each in group["params"]))
    return adamw(groups, **settings)
torch.optim.AdamW = counting
fault = Reference.fault
for command in alone:
    root.main(command, standalone_mode=False)
children, rank = [], 0
for number in (1, 2):
    if child := os.fork():
        children.append(child)
    else:
        children, rank = [], number
        break
os.environ.update(VOX_LAUNCHED="1", RANK=str(rank), WORLD_SIZE="3", GLOO_SOCKET_IFNAME="lo")
for number, command in enumerate(shared):
    os.environ["RENDEZVOUS_FILE"] = store + str(number)
    doubtful = rank == 1 and any(each.endswith("doubted") for each in command)
    doubted = lambda *given: fault(*given) or "as asked"
    Reference.fault = doubted if doubtful else fault
    root.main(command, standalone_mode=False)
Path(f"{store}-held{rank}").write_text(json.dumps(held))
ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(max(map(abs, ended), default=0))
"""
"""Commands of one process, and of three: forks, so that torch is imported once. The one in the
middle receives a piece while it sends another, and finds a fault in vox's own functions in a run
named `doubted`. Each rank writes how many elements its optimizer had, in each run."""


forks = pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch")


@pytest.fixture
def forked(quick, tmp_path):
    """Runs commands of `vox train` in one process, and others in three; a folder or flags each."""
    (suite := tmp_path / "suite.toml").write_text(SUITE)

    def run(alone: Sequence[Sequence[object]], shared: Sequence[Sequence[object]]) -> None:
        def whole(given: Sequence[object]) -> list[str]:
            if given[0] == "train":
                return [str(each) for each in given]
            name, *more = given
            command = [*quick, "--eval-suite", suite, "--max-steps", 2, "--out", tmp_path / name]
            return [str(each) for each in (*command, *more)]

        commands = (json.dumps([*map(whole, each)]) for each in (alone, shared))
        done = vox([sys.executable, "-c", FORKED, tmp_path / "store"], *commands)
        assert done.returncode == 0, done.stderr

    return run


@forks
def test_three_processes_train_what_one_trains(forked, tmp_path):
    """Bit for bit, with dropout, validation and evaluations, and with a base that is split."""
    forked([("one", *ADAPTER)], [("three", *ADAPTER), ("split", *ADAPTER, "--shard")])
    for name in ("three", "split"):
        assert numbers(tmp_path / name) == numbers(tmp_path / "one")
        assert weights(tmp_path / name) == weights(tmp_path / "one")
        assert answers(tmp_path / name) == answers(tmp_path / "one")


@forks
@pytest.mark.long
def test_three_processes_split_a_mixture_of_experts(forked, tmp_path):
    """Bit for bit, its experts read from the files one by one."""
    model = ("--model", make_model("qwen2_moe", tmp_path / "mixture"))
    forked([("one", *ADAPTER, *model)], [("split", *ADAPTER, *model, "--shard")])
    assert numbers(tmp_path / "split") == numbers(tmp_path / "one")
    assert weights(tmp_path / "split") == weights(tmp_path / "one")


@forks
@pytest.mark.long
def test_split_weights_that_are_trained_and_a_fault_that_one_rank_finds(forked, tmp_path):
    """To 1e-5, and of a run that goes on; 1e-6 of a run with transformers' own functions."""
    then = ["train", "--resume", tmp_path / "parts", "--allow-change", "max-steps"]
    forked(
        [("one", *ADAPTER), ("whole", *FULL)],
        [
            ("doubted", *ADAPTER, "--shard"),
            ("parts", *FULL, "--shard", "--max-steps", 1),
            [*then, "--max-steps", 2, "--shard"],
        ],
    )
    for one, other in zip(*(numbers(tmp_path / name) for name in ("one", "doubted")), strict=True):
        assert other == pytest.approx(one, rel=1e-6)  # transformers' own functions, on every rank
    assert_alike(tmp_path / "whole", tmp_path / "parts")
    tensors = load_file(tmp_path / "parts/checkpoints/step-2/adapter.safetensors")
    split = [each.size for name, each in tensors.items() if ".layers." in name and each.ndim > 1]
    rest = sum(each.size for each in tensors.values()) - sum(split)
    held = [json.loads((tmp_path / f"store-held{rank}").read_text())[-1] for rank in range(3)]
    assert sum(held) == sum(split) + 3 * rest
    assert max(held) - rest < 0.4 * sum(split), "a rank has a third of the split tensors"


def assert_alike(whole: Path, parts: Path) -> None:
    """Losses, and the tensors of the last checkpoint, are within 1e-5, relative to the largest."""
    losses = numbers(parts)
    del losses[2]  # of the validation when it had stopped
    for (_, one), (_, other) in zip(numbers(whole), losses, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    for file in ("adapter", "moments"):
        path = f"checkpoints/step-2/{file}.safetensors"
        first, second = (load_file(run / path) for run in (whole, parts))
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            apart = np.abs(tensor - second[name]).max()
            assert apart <= 1e-5 * np.abs(tensor).max(), f"{file}: {name}"
    texts = [
        [json.loads(line)["answer"] for line in b"".join(answers(run)).splitlines()]
        for run in (whole, parts)
    ]
    assert texts[0] == texts[1]


@pytest.mark.long
def test_ranks_of_a_launcher_train_what_one_process_trains(command, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert vox(command, "--max-steps", 3, "--out", one).returncode == 0
    done = vox(command, "--max-steps", 3, "--out", two, "--processes", 2)
    assert done.returncode == 0, done.stderr
    assert "3 of 3" in done.stdout
    assert numbers(two) == numbers(one)
    assert weights(two) == weights(one)


@pytest.mark.long
def test_a_run_goes_on_with_any_number_of_processes(command, tmp_path):
    one, then = tmp_path / "one", tmp_path / "then"
    assert vox(command, "--max-steps", 4, "--out", one).returncode == 0
    for steps, processes in ((1, 2), (2, 1), (4, 3)):
        begin = [*command, "--out", then] if steps == 1 else [*VOX, "train", "--resume", then]
        more = ["--max-steps", steps, *["--allow-change", "max-steps"] * (steps > 1)]
        done = vox(begin, *more, "--processes", processes)
        assert done.returncode == 0, done.stderr
    assert weights(then) == weights(one)


@pytest.fixture
def running(
    command: list[str], tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A long run of two processes, after its first steps, and the ranks' processes."""
    run = tmp_path / "run"
    telemetry = run / "telemetry.jsonl"
    arguments = [*command, "--max-steps", "100000", "--save-every", "0", "--out", str(run)]
    launcher = subprocess.Popen(
        [*arguments, "--processes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        end = time.monotonic() + PATIENCE
        while not (telemetry.exists() and '"event": "step"' in telemetry.read_text()):
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < end
            time.sleep(0.1)
        yield launcher, ranks_of(launcher.pid)
    finally:
        launcher.kill()
        launcher.wait()


def ranks_of(pid: int) -> list[int]:
    """The processes of a launcher's ranks, in order."""
    found = {}
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        if rank := re.search(rb"\0RANK=(\d)", Path(f"/proc/{child}/environ").read_bytes()):
            found[int(rank[1])] = child
    return [found[rank] for rank in sorted(found)]


def gone(pids: list[int]) -> None:
    """Wait until none of the processes is there."""
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks through /proc")
def test_a_rank_that_is_killed_ends_the_run_by_name(running, command, tmp_path):
    launcher, ranks = running
    os.kill(ranks[1], signal.SIGKILL)
    _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "error[VOX-T006]: rank 1 of the run has died" in said
    assert f"process {ranks[1]} on" in said
    assert "ended by SIGKILL" in said
    gone(ranks)
    (kept,) = (tmp_path / "run" / "checkpoints").iterdir()
    last = max(step for step, _ in numbers(tmp_path / "run"))
    assert kept.name == f"step-{last}"
    more = ["--max-steps", last + 1, "--allow-change", "max-steps"]
    assert vox([*VOX], "train", "--resume", tmp_path / "run", *more).returncode == 0


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks through /proc")
def test_a_signal_stops_every_rank_after_the_same_step(running):
    launcher, ranks = running
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 130, said
    assert "resume with: vox train --resume" in said
    gone(ranks)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks through /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named(running, rank):
    launcher, ranks = running
    os.kill(ranks[rank], signal.SIGSTOP)
    _, said = launcher.communicate(timeout=30)
    assert f"error[VOX-T006]: rank {rank} of the run has stopped responding" in said
    gone(ranks)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks through /proc")
def test_ranks_do_not_outlive_their_launcher(running):
    launcher, ranks = running
    launcher.kill()
    gone(ranks)


def test_more_processes_than_examples(command, tmp_path, monkeypatch):
    monkeypatch.setenv("VOX_LAUNCHED", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "7")
    with pytest.raises(ConfigError, match="fewer examples than there are processes") as raised:
        root.main([*command[len(VOX) :], "--out", str(tmp_path / "run")], standalone_mode=False)
    assert raised.value.code == "VOX-C004"
    assert not (tmp_path / "run").exists()
