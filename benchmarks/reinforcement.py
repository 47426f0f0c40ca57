"""GRPO with SmolLM2-135M on a task of reasoning-gym: the held-out reward, and cpu against mlx.

    python benchmarks/reinforcement.py reward FOLDER
    python benchmarks/reinforcement.py backends FOLDER

`reward` trains forty steps of 32 answers, and prints the mean reward of one greedy answer to each
held-out row, before and after, with its 95 % interval. `backends` takes the first five steps on
both in float32, and prints the losses, their largest distance, and whether the texts are equal;
its task has rewards that differ from the first step on. Both need the extra
`vox-ml-objectives[gym]`; `backends` needs mlx.

reasoning-gym makes row n from `seed + n`: the two seeds are further apart than the rows are many.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TASK = "gym:syllogism?size=500&seed=1"
HELD_OUT = "gym:syllogism?size=200&seed=1000001"
COMMON = ["--model", "smollm2-135m", "--objective", "grpo", "--reward", "gym"]
COMMON += ["--rollout-tokens", "4", "--schedule", "constant", "--warmup", "0"]
VARIED = "gym:spell_backward?size=50&seed=1&min_word_len=3&max_word_len=3"
STEPS = 5


def train(run: Path, task: str, *flags: str) -> None:
    """Train in a process of its own."""
    command = [sys.executable, "-m", "vox_core.cli", "train", task, "--out", str(run)]
    subprocess.run([*command, *COMMON, *flags], check=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def reward(folder: Path) -> str:
    run = folder / "reward"
    flags = ("--lr", "2e-4", "--batch-size", "4", "--rollouts", "8", "--max-steps", "40")
    train(run, TASK, "--valid", HELD_OUT, *flags)
    lines = read(run / "telemetry.jsonl")
    found = [line for line in lines if line["event"] == "validation"]
    took = lines[-1]["time"] - lines[0]["time"]
    rows = [
        f"| {line['step']} | {line['reward']:.3f} | ± {line['reward_margin']:.3f} |"
        for line in found
    ]
    table = ["| step | held-out reward | 95 % |", "|---|---|---|", *rows]
    return "\n".join([*table, f"{took / 60:.1f} minutes, with both validations"])


def backends(folder: Path) -> str:
    losses, answers = [], []
    flags = ("--lr", "5e-4", "--dtype", "fp32", "--batch-size", "1", "--rollouts", "6")
    flags += ("--max-steps", str(STEPS))
    for name in ("cpu", "mlx"):
        train(folder / name, VARIED, *flags, "--backend", name)
        lines = read(folder / name / "telemetry.jsonl")
        losses.append([line["loss"] for line in lines if line["event"] == "step"])
        answers.append([line["answer"] for line in read(folder / name / "rollouts.jsonl")])
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    same = "the same texts" if answers[0] == answers[1] else "other texts"
    shown = ", ".join(f"{loss:.6f}" for loss in losses[0])
    return f"losses {shown}: at most {apart:.1e} apart; {len(answers[0])} answers, {same}"


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    sys.stdout.write({"reward": reward, "backends": backends}[what](where) + "\n")
