"""`kill -9` at random moments of real runs of a tiny model, gone on with each time.

    python tests/run/random_kills.py N [SEED] [--grpo] [--processes]

Prints a JSON object; `broken` lists what did not hold. Every loss in the telemetry of a killed run,
of whichever start, has to be that of the run that nobody killed, as `float.hex()`; so has the final
adapter, bit for bit; and every start has to find the newest checkpoint that was announced, or a
newer one, with none damaged.

`--grpo` kills runs that learn from their own answers, by a reward function in a process of its
own; their answers and rewards have to be those of the whole run as well.

The command is run in forks of a process that has imported what it needs, which takes the imports
out of every start; `--processes` starts the real `vox train` each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.run.lines import read
from vox_core.run import checkpoint
from vox_testing.tiny import make_model

STEPS = 30
TALK = [(f"What is {n} and {n}?", f"It is {2 * n}, I think.") for n in range(7)]
FLAGS = {
    "backend": "cpu",
    "dtype": "fp32",
    "rank": 4,
    "dropout": 0.1,
    "lr": 1e-2,
    "batch-size": 2,
    "max-steps": STEPS,
    "save-every": 1,
    "eval-every": 10,
}
GRPO = {
    "objective": "grpo",
    "rollouts": 3,
    "rollout-tokens": 5,
    "dropout": 0,
    "max-steps": 8,
    "eval-every": 4,
}
JUDGE = "def vowels(row, answer):\n    return sum(answer.count(each) for each in 'aeiou')\n"


class Started:
    """A `vox train` that is under way, in a fork of this process or in one of its own."""

    def __init__(self, arguments: list[str], log: Path, fork: bool) -> None:
        with log.open("ab") as output:
            self.pid = (_forked if fork else _spawned)(arguments, output.fileno())

    def kill_after(self, seconds: float, begun: Callable[[], bool]) -> bool:
        """Kill it so long after it has `begun`, unless it has ended: whether it has been killed."""
        until: float | None = None
        while until is None or time.monotonic() < until:
            if status := self._ended(os.WNOHANG):
                return self._was_killed(status)
            if until is None and begun():
                until = time.monotonic() + seconds
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self._was_killed(self._ended(0))

    def end(self) -> None:
        """Wait until it has."""
        assert not self._was_killed(self._ended(0))

    def _ended(self, how: int) -> tuple[int] | None:
        pid, status = os.waitpid(self.pid, how)
        return (status,) if pid else None

    def _was_killed(self, ended: tuple[int] | None) -> bool:
        assert ended
        code = os.waitstatus_to_exitcode(ended[0])
        assert code in (0, -signal.SIGKILL), f"vox train ended with {code}"
        return code != 0


def _forked(arguments: list[str], output: int) -> int:
    if child := os.fork():
        return child
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        from vox_core.cli import main

        main(arguments)
        os._exit(0)
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    finally:
        os._exit(99)


def _spawned(arguments: list[str], output: int) -> int:
    command = [sys.executable, "-m", "vox_core.cli", *arguments]
    return subprocess.Popen(command, stdout=output, stderr=output).pid


def imported() -> None:
    """What `vox train` imports on its way, so that its forks need not."""
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import vox_core.run.train  # noqa: F401
    import vox_cpu  # noqa: F401
    import vox_torch.train  # noqa: F401


class Kills:
    """The whole run, and those that are killed."""

    def __init__(self, root: Path, seed: int, fork: bool, grpo: bool) -> None:
        self._root, self._fork, self._random = root, fork, random.Random(seed)
        model = make_model("llama", root / "base")
        rows = [json.dumps({"prompt": question, "completion": answer}) for question, answer in TALK]
        data = root / "data"
        data.mkdir()
        (data / "train.jsonl").write_text("\n".join(rows))
        (data / "valid.jsonl").write_text("\n".join(rows[:2]))
        self._flags = ["--model", str(model), "--data", str(data)]
        chosen = FLAGS | GRPO if grpo else FLAGS
        self._steps = int(chosen["max-steps"])
        if grpo:
            (root / "judge.py").write_text(JUDGE)
            chosen = chosen | {"reward": f"{root / 'judge.py'}:vowels"}
        for key, value in chosen.items():
            self._flags += [f"--{key}", str(value)]
        self.broken: list[str] = []
        self.kills, self.begun, self.finished = 0, 0, 0

    def go(self, kills: int) -> dict[str, Any]:
        began = time.monotonic()
        whole = self._root / "whole"
        self._start(["--out", str(whole), *self._flags]).end()
        took = time.monotonic() - began
        self._curve, self._adapter = curve(whole), adapter(whole)
        self._answers = answers(whole)
        assert len(self._curve) == self._steps
        while self.kills < kills:
            self._one_run(kills, took)
        return {
            "kills": self.kills,
            "runs": self.finished,
            "seconds": time.monotonic() - began,
            "seconds_of_a_whole_run": took,
            "broken": self.broken,
        }

    def _one_run(self, kills: int, took: float) -> None:
        """Kill and go on until it ends: half of the times at a moment after a first step, when it
        trains and writes, and else at one of the whole time that a run takes."""
        run, command = self._begin()
        while True:
            if self.kills >= kills:
                self._start(command).end()
                break
            steps = self._steps_of(run)
            trains = self._random.random() < 0.5
            self.kills += self._start(command).kill_after(
                self._random.uniform(0, 0.5 if trains else 0.9) * took,
                (lambda: self._steps_of(run) > steps) if trains else (lambda: True),  # noqa: B023
            )
            if (run / "vox_adapter.json").exists() and self._step_of(run) == self._steps:
                break
            self._check(run)
            if checkpoint.numbered(run / "checkpoints"):
                command = ["--resume", str(run)]
            else:
                run, command = self._begin()
        self._check(run)
        if adapter(run) != self._adapter:
            self.broken.append(f"{run.name}: the final adapter is another one")
        if left := [p.name for p in run.rglob(".tmp-*")]:
            self.broken.append(f"{run.name}: left over: {left}")
        self.finished += 1

    def _begin(self) -> tuple[Path, list[str]]:
        # In a folder of its own: an observer's process outlives a killed run for a moment.
        self.begun += 1
        run = self._root / f"run-{self.begun}"
        return run, ["--out", str(run), *self._flags]

    def _start(self, flags: list[str]) -> Started:
        return Started(["train", *flags], self._root / "log", self._fork)

    def _step_of(self, run: Path) -> int:
        return int(json.loads((run / "vox_adapter.json").read_text())["step"])

    def _steps_of(self, run: Path) -> int:
        return sum(1 for _ in curve_lines(run))

    def _check(self, run: Path) -> None:
        """What a killed run has left, before anything goes on with it."""
        for step, loss in curve_lines(run):
            if loss != self._curve.get(step):
                self.broken.append(f"{run.name}: step {step} has loss {loss}")
        if others := answers(run) - self._answers:
            self.broken.append(f"{run.name}: other answers: {sorted(others)[:3]}")
        announced = [line["step"] for line in lines(run) if line["event"] == "checkpoint"]
        there = checkpoint.numbered(run / "checkpoints")
        if announced and (not there or int(there[0].name[5:]) < max(announced)):
            self.broken.append(f"{run.name}: {max(announced)} was announced, {there} is there")
        self.broken += [f"{run.name}: {p}: {why}" for p in there if (why := checkpoint.fault(p))]


def lines(run: Path) -> Iterator[dict[str, Any]]:
    return read(run / "telemetry.jsonl")


def curve_lines(run: Path) -> Iterator[tuple[int, str]]:
    for line in lines(run):
        if line["event"] == "step":
            yield line["step"], line["loss"].hex()


def curve(run: Path) -> dict[int, str]:
    return dict(curve_lines(run))


def answers(run: Path) -> set[str]:
    """Return the lines of `rollouts.jsonl`; none for supervised training."""
    path = run / "rollouts.jsonl"
    return {json.dumps(line) for line in read(path)} if path.exists() else set()


def adapter(run: Path) -> bytes:
    return (run / "adapter_model.safetensors").read_bytes()


def main(kills: int, seed: int, fork: bool, grpo: bool, say: Callable[[str], object]) -> None:
    if fork:
        imported()
    with tempfile.TemporaryDirectory(prefix="vox-kills-") as root:
        made = Kills(Path(root), seed, fork, grpo)
        try:
            told = made.go(kills)
        except AssertionError:
            say((Path(root) / "log").read_text()[-4000:])
            raise
    say(json.dumps(told, indent=2) + "\n")
    sys.exit(bool(told["broken"]))


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:] if each.isdecimal()]
    main(
        numbers[0] if numbers else 50,
        numbers[1] if len(numbers) > 1 else 0,
        "--processes" not in sys.argv,
        "--grpo" in sys.argv,
        sys.stdout.write,
    )
