"""Speed and memory of vox's DPO against TRL's DPOTrainer, in interleaved rounds.

    python3 -m venv ENV
    ENV/bin/pip install -c constraints.txt torch==2.13.0 trl==1.16 peft transformers
    .venv/bin/python -m benchmarks.dpo_speed --trl ENV/bin/python [--rounds 3] [--steps 5]

SmolLM2-135M in bfloat16, one epoch over the same pairs in steps of 8, LoRA of rank 16 on all linear
layers. TRL has its defaults, then its best settings (`trl_dpo.py`); vox has its own (`vox_dpo.py`),
in one pass and in two. Each run is a new process, and they take turns in each round.

Tokens are those of both conversations of a pair, without padding; their rate leaves out the first
step. TRL computes the reference in each step; at its best, as vox, once, before the first one: its
rate is given without it (a second epoch; for vox, which caches it, a second run) and with it (one
epoch).
Memory is the process's peak resident set.

Rates are per second, or with `--cpu` per second of processor time, in one thread: for a machine
with other work on it. The pairs are excerpts of docs/guide: prompts of about 15 to 140 tokens and
a template, answers of 50 to 400.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.training import machine
from vox_core import SPIN_COUNT, models

GUIDE = Path(__file__).resolve().parents[1] / "docs/guide"
BATCH, SEED = 8, 7


class Run(NamedTuple):
    """Tokens per second after the first step, the same with the reference, peak resident bytes."""

    speed: float
    with_reference: float
    memory: int


def write_pairs(file: Path, pairs: int) -> None:
    """Write pairs of excerpts: about 1.4 tokens a word."""
    words = " ".join(each.read_text() for each in sorted(GUIDE.glob("*.md"))).split()
    draw = random.Random(SEED)

    def message(role: str, fewest: int, most: int) -> list[dict[str, str]]:
        count = draw.randint(fewest, most)
        start = draw.randrange(len(words) - count)
        return [{"role": role, "content": " ".join(words[start : start + count])}]

    with file.open("w", encoding="utf-8") as out:
        for _ in range(pairs):
            row = {
                "prompt": message("user", 10, 70),
                "chosen": message("assistant", 25, 190),
                "rejected": message("assistant", 25, 190),
            }
            out.write(json.dumps(row) + "\n")


def run(
    python: str,
    script: str,
    model: str,
    pairs: str,
    clock: str,
    scratch: Path,
    options: tuple[str, ...] = (),
) -> Run:
    """Run a script in a process of its own, with an empty cache.

    Args:
        clock: the one of its results that counts: time or cpu.
        options: of the script.
    """
    result, said = scratch / "result.json", scratch / "said"
    with tempfile.TemporaryDirectory(dir=scratch) as cache, said.open("w") as log:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": cache}
        if clock == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        if script == "vox_dpo.py":
            environment["GOMP_SPINCOUNT"] = SPIN_COUNT  # as the command line has it
        file = str(Path(__file__).with_name(script))
        command = [python, file, model, pairs, str(result), *options]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{script} failed:\n{said.read_text()}")
    steps = json.loads(result.read_text())
    reference = 0.0
    if steps[0]["tokens"] == 0:
        before, after, *steps = steps
        reference = (after[clock] - before[clock]) / sum(step["tokens"] for step in steps)
    seconds = steps[-1][clock] - steps[0][clock]
    each = seconds / sum(step["tokens"] for step in steps[1:])
    return Run(1 / each, 1 / (each + reference), 1024 * usage.ru_maxrss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trl", required=True, help="python of an environment with TRL")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="by processor time, in one thread")
    parser.add_argument("--quick", action="store_true", help="without vox in two passes")
    parser.add_argument("--out", type=Path, help="file for the section of docs/benchmarks.md")
    given = parser.parse_args()
    model = str(models.resolve(given.model).path)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        scratch, pairs = Path(folder), Path(folder) / "pairs.jsonl"
        write_pairs(pairs, BATCH * given.steps)
        measured = partial(
            run,
            model=model,
            pairs=str(pairs),
            clock="cpu" if given.cpu else "time",
            scratch=scratch,
        )
        for number in range(given.rounds):
            print(f"DPO: round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
            runs = {"vox": measured(sys.executable, "vox_dpo.py")}
            if not given.quick:
                two = measured(sys.executable, "vox_dpo.py", options=("two-pass",))
                runs["vox, two passes"] = two
            runs["trl"] = measured(given.trl, "trl_dpo.py")
            runs["trl-best"] = measured(given.trl, "trl_dpo.py", options=("best",))
            found.append(runs)
    made = section(found, given)
    print(made)
    if given.out:
        given.out.write_text(made)


def section(rounds: Sequence[Mapping[str, Run]], given: argparse.Namespace) -> str:
    """Format all rounds as a section of docs/benchmarks.md."""
    described = machine.describe("cpu", len(os.sched_getaffinity(0)))
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions().items())
    lines = [
        "## DPO",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}; {versions}.",
        "",
        f"`benchmarks/dpo_speed.py`, {given.model} in bfloat16, {described['cpu']}, "
        f"{described['threads']} threads. Rounds: {len(rounds)}, of {given.steps} steps with "
        f"{BATCH} pairs. Tokens per second without the reference (a second run or epoch), and with "
        "it (one epoch).",
        "",
        "| trainer | tokens/s | vox speedup | with the reference | vox speedup | peak memory |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in rounds[0]:
        runs = [each[name] for each in rounds]
        ahead = [each["vox"].speed / each[name].speed for each in rounds]
        once = [each["vox"].with_reference / each[name].with_reference for each in rounds]
        cells = [
            name,
            f"{statistics.median(one.speed for one in runs):,.0f}",
            f"{statistics.median(ahead):.2f} ({min(ahead):.2f} to {max(ahead):.2f})",
            f"{statistics.median(one.with_reference for one in runs):,.0f}",
            f"{statistics.median(once):.2f} ({min(once):.2f} to {max(once):.2f})",
            f"{max(one.memory for one in runs) / 1e9:.2f} GB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
