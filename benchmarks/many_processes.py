"""Does a run of N processes train what one process trains?

    python benchmarks/many_processes.py equal OUT          1, 2 and 4 processes, 20 steps, dropout
    python benchmarks/many_processes.py resumed OUT        2 processes, then 1, 3 and 2
    python benchmarks/many_processes.py killed OUT COUNT   a rank killed or stopped at any moment
    python benchmarks/many_processes.py objectives OUT     DPO and GRPO, 3 steps, 1 and 2 processes
    python benchmarks/many_processes.py speed OUT          tokens/s and bytes on the loopback

SmolLM2-135M in float32 on the quick start's data, one thread per process but for `speed`. A line
per comparison: the largest relative difference of a loss, that of the adapter relative to its
largest value, and whether the files are the same bytes.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import vox_core

VOX = str(Path(sys.executable).with_name("vox"))
DATA = Path(vox_core.__file__).parent / "quickstart" / "data"
COMMON = [
    *("--model", "smollm2-135m", "--dtype", "fp32", "--backend", "cpu", "--allow-cpu"),
    *("--tune", "ignore", "--batch-size", "8", "--micro-batch-tokens", "128"),
]
ROWS = ["--data", str(DATA / "train.jsonl"), "--valid", str(DATA / "valid.jsonl")]
DROPOUT = ["--dropout", "0.1"]


def train(*arguments: object, processes: int = 1, threads: int = 1) -> float:
    """Run `vox train`; return the seconds it took."""
    began = time.monotonic()
    subprocess.run(
        [VOX, "train", *map(str, arguments), "--processes", str(processes)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.DEVNULL,
    )
    return time.monotonic() - began


def events(run: Path, name: str) -> list[dict[str, float]]:
    lines = (json.loads(line) for line in (run / "telemetry.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


def compare(label: str, one: Path, other: Path) -> bool:
    """Print how far two runs are apart; return whether they are within 1e-6 and 1e-5."""
    losses = [{int(e["step"]): e["loss"] for e in events(run, "step")} for run in (one, other)]
    apart = max(abs(losses[1][step] / loss - 1) for step, loss in losses[0].items())
    first, second = (load_file(run / "adapter_model.safetensors") for run in (one, other))
    largest = max(float(np.abs(value).max()) for value in first.values())
    moved = max(float(np.abs(first[name] - second[name]).max()) for name in first) / largest
    files = [(run / "adapter_model.safetensors").read_bytes() for run in (one, other)]
    same = "same bytes" if files[0] == files[1] else "other bytes"
    print(f"{label}: losses {apart:.1e}, adapter {moved:.1e}, {same}", flush=True)
    return apart <= 1e-6 and moved <= 1e-5


def equal(out: Path) -> bool:
    for processes in (1, 2, 4):
        train(*COMMON, *ROWS, *DROPOUT, "--max-steps", 20, "--out", out / str(processes),
              processes=processes)  # fmt: skip
    good = [compare(f"{n} processes", out / "1", out / str(n)) for n in (2, 4)]
    return all(good)


def resumed(out: Path) -> bool:
    settings = [*COMMON, *ROWS[:2], *DROPOUT, "--save-every", 3]
    train(*settings, "--max-steps", 6, "--out", out / "whole", processes=2)
    found = []
    for processes in (1, 3, 2):
        run = out / f"then-{processes}"
        # A learning rate that does not depend on the number of steps.
        train(*settings, "--max-steps", 3, "--allow-change", "max-steps", "--schedule", "constant",
              "--out", run, processes=2)  # fmt: skip
        train("--resume", run, "--max-steps", 6, "--allow-change", "max-steps",
              processes=processes)  # fmt: skip
        found.append(run)
    constant = out / "constant"
    train(*settings, "--schedule", "constant", "--max-steps", 6, "--out", constant)
    good = [compare(f"2 processes, {run.name}", constant, run) for run in found]
    return all(good)


def objectives(out: Path) -> bool:
    rows = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()[:32]]
    pairs, prompts = out / "pairs.jsonl", out / "prompts.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    asked = [(row["messages"][0]["content"], row["messages"][-1]["content"]) for row in rows]
    pairs.write_text(
        "".join(
            json.dumps({"prompt": p, "chosen": a, "rejected": a[::-1]}) + "\n" for p, a in asked
        )
    )
    prompts.write_text(
        "".join(json.dumps({"prompt": p, "completion": "a"}) + "\n" for p, _ in asked)
    )
    reward = out / "reward.py"
    reward.write_text("def judge(row, answer):\n    return answer.count('e') / 10\n")
    cases = {
        "dpo": ["--objective", "dpo", "--data", pairs],
        "grpo": ["--objective", "grpo", "--data", prompts, "--reward", f"{reward}:judge",
                 "--rollouts", 4, "--rollout-tokens", 12],
    }  # fmt: skip
    good = []
    for name, case in cases.items():
        for processes in (1, 2):
            train(*COMMON, *case, "--max-steps", 3, "--out", out / f"{name}-{processes}",
                  processes=processes)  # fmt: skip
        good.append(compare(f"{name}, 2 processes", out / f"{name}-1", out / f"{name}-2"))
    return all(good)


def killed(out: Path, count: int) -> bool:
    """Kill or stop a rank at a random moment, and resume."""
    settings = [*COMMON, *ROWS[:2], *DROPOUT, "--save-every", 1, "--max-steps", 8]
    train(*settings, "--out", out / "undisturbed")
    draw, good = random.Random(1), 0
    for number in range(count):
        run, rank = out / f"run-{number}", draw.randrange(2)
        how = draw.choice([signal.SIGKILL, signal.SIGSTOP])
        moment = draw.uniform(1, 50)
        command = [VOX, "train", *map(str, settings), "--out", str(run), "--processes", "2"]
        launcher = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(moment)
        ranks = children(launcher.pid)
        if launcher.poll() is None and len(ranks) == 2:
            os.kill(ranks[rank], how)
            began = time.monotonic()
            _, said = launcher.communicate(timeout=60)
            took = time.monotonic() - began
            left = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
            named = f"rank {rank} of the run" in said or f"rank {rank}, process" in said
        else:
            launcher.communicate()
            took, left, named = 0.0, [], True
        train(*settings, "--out", run, "--resume", "auto", processes=draw.choice([1, 2]))
        how_it_ended = f"gone in {took:.1f} s, named {named}, left {len(left)}"
        label = f"{number}: rank {rank}, {how.name} after {moment:.1f} s, {how_it_ended}"
        same = compare(label, out / "undisturbed", run)
        good += same and took < 30 and named and not left
    print(f"{good} of {count}")
    return good == count


def children(pid: int) -> list[int]:
    """Return the ranks of a launcher, in order."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    found = {}
    for child in map(int, text.split()):
        environ = Path(f"/proc/{child}/environ").read_bytes()
        if match := re.search(rb"(?:^|\0)RANK=(\d+)", environ):
            found[int(match[1])] = child
    return [found[rank] for rank in sorted(found)]


def speed(out: Path) -> bool:
    settings = [*COMMON[:-2], "--micro-batch-tokens", 512, "--batch-size", 32, *ROWS[:2]]
    rates, run = {1: [], 2: []}, 0
    for _ in range(3):
        for processes, threads in ((1, 2), (2, 1)):
            run += 1
            before = loopback()
            train(*settings, "--max-steps", 4, "--out", out / str(run), processes=processes,
                  threads=threads)  # fmt: skip
            steps = events(out / str(run), "step")[1:]
            rates[processes].append(
                sum(e["tokens"] for e in steps) / sum(e["seconds"] for e in steps)
            )
            if processes == 2:
                sent = (loopback() - before) / 4
                gradient = 4 * sum(
                    v.size for v in load_file(out / str(run) / "adapter_model.safetensors").values()
                )
    one, two = (float(np.median(rates[n])) for n in (1, 2))
    print(f"tokens/s: 1 process of 2 threads {one:.0f}, 2 of 1 {two:.0f}: {two / one:.2f}")
    print(
        f"bytes per step and rank {sent / 2e6:.1f} MB, gradient {gradient / 1e6:.1f} MB: "
        f"{sent / 2 / gradient:.2f}"
    )
    return two >= 0.9 * one


def loopback() -> int:
    """Return the bytes sent over the loopback interface so far."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    kind, folder, *rest = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    calls = {"equal": equal, "resumed": resumed, "objectives": objectives, "speed": speed}
    good = killed(Path(folder), int(rest[0])) if kind == "killed" else calls[kind](Path(folder))
    sys.exit(not good)
