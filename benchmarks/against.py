"""Training speed and peak memory of this checkout against another one, in interleaved rounds.

    .venv/bin/python benchmarks/against.py CHECKOUT [--rounds 3] [--steps 5] [--dtype bf16 fp32]
    .venv/bin/python benchmarks/against.py . --quant nf4 int8 --dtype bf16

Each round runs `vox train` on SmolLM2-135M once from each checkout, in a new process, on the same
rows of mixed length. Tokens per second leave out the first step; memory is the process's peak
resident set. Both take turns, so that a busy machine slows both, and the ratio is the median of the
ratios of the rounds. Each checkout has its own environment: `make .venv/.installed-dev` in both.
With `--quant`, this checkout trains over quantised bases, and the other one as ever.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "vox_core/quickstart/data/train.jsonl"
SEQ_LEN, ROWS, SEED = 2048, 200, 7


class Run(NamedTuple):
    """Tokens per second after the first step, peak resident bytes, the losses."""

    speed: float
    memory: int
    losses: list[float]


def write_rows(file: Path) -> None:
    """Text rows whose length is log-normal: median about 220 tokens, cut at `SEQ_LEN` by vox."""
    words = QUICKSTART.read_text(encoding="utf-8").split()
    draw = random.Random(SEED)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(ROWS):
            text = " ".join(draw.choices(words, k=int(draw.lognormvariate(4.6, 0.95)) + 16))
            out.write(json.dumps({"text": text}) + "\n")


def train(checkout: Path, rows: Path, steps: int, dtype: str, *more: str) -> Run:
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        command = [str(checkout / ".venv/bin/vox"), "train"]
        command += ["--model", "smollm2-135m", "--data", str(rows), "--backend", "cpu"]
        command += ["--max-steps", str(steps), "--batch-size", "4", "--seq-len", str(SEQ_LEN)]
        command += ["--dtype", dtype, "--out", str(run), *more]
        said = Path(scratch) / "said"
        with said.open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"vox train failed with {checkout}:\n{said.read_text()}")
        lines = map(json.loads, (run / "telemetry.jsonl").read_text().splitlines())
        done = [line for line in lines if line["event"] == "step"]
    seconds = done[-1]["time"] - done[0]["time"]
    tokens = sum(step["tokens"] for step in done[1:])
    return Run(tokens / seconds, 1024 * usage.ru_maxrss, [step["loss"] for step in done])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--quant", nargs="+", default=["none"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        write_rows(rows)
        for dtype, quant in itertools.product(given.dtype, given.quant):
            own = () if quant == "none" else ("--quant", quant)
            pairs = [
                (
                    train(ROOT, rows, given.steps, dtype, *own),
                    train(given.checkout.resolve(), rows, given.steps, dtype),
                )
                for _ in range(given.rounds)
            ]
            report(" ".join((dtype, *own)), pairs)


def report(dtype: str, pairs: list[tuple[Run, Run]]) -> None:
    speed = [ours.speed / theirs.speed for ours, theirs in pairs]
    memory = [ours.memory / theirs.memory for ours, theirs in pairs]
    apart = max(
        abs(a - b) / b
        for ours, theirs in pairs
        for a, b in zip(ours.losses, theirs.losses, strict=True)
    )
    ours = statistics.median(ours.speed for ours, _ in pairs)
    print(
        f"{dtype}: {ours:.0f} tokens/s, {statistics.median(speed):.3f} of the other's "
        f"({min(speed):.3f} to {max(speed):.3f}); peak memory {pairs[0][0].memory / 1e9:.2f} GB, "
        f"{statistics.median(memory):.3f} of the other's; losses at most {apart:.1e} apart",
        flush=True,
    )


if __name__ == "__main__":
    main()
