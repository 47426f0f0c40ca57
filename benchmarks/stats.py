"""Counting rows (`vox data stats`, without a model) against `wc -l` and `json.loads` of each line.

    python benchmarks/stats.py [--rows 1000000] [--rounds 3] [--form messages]

Each measurement is a process of its own, start included; rounds are interleaved, and the ratio is
taken round by round, of processor time (user and system), because other processes may be busy on
the machine; of real time too. Memory is the most that the process had.
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
import time
from pathlib import Path
from typing import Any, NamedTuple

TEXT = "the answer is a number and the question is a word how are you well thank"
WORDS = TEXT.split()
BASE = """
import json, subprocess, sys
subprocess.run(["wc", "-l", sys.argv[1]], stdout=subprocess.DEVNULL, check=True)
with open(sys.argv[1], "rb") as file:
    for line in file:
        json.loads(line)
"""
VOX = """
import sys
from vox_core.cli import main
main(["data", "stats", "--data", sys.argv[1]])
"""


class Took(NamedTuple):
    seconds: float
    processor: float
    megabytes: float


def write_rows(path: Path, rows: int, form: str) -> None:
    """Short rows, of some 40 to 160 bytes."""
    rng = random.Random(1)
    with path.open("w") as file:
        for number in range(rows):
            file.write(json.dumps(row(rng, form, number)) + "\n")


def row(rng: random.Random, form: str, number: int) -> dict[str, Any]:
    asked, said = (" ".join(rng.choices(WORDS, k=rng.randint(3, n))) for n in (9, 15))
    if form == "text":
        return {"text": f"{asked} {said}"}
    if form == "completion":
        return {"prompt": asked, "completion": said}
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    more = {"id": number, "category": rng.choice(WORDS), "rating": rng.randint(1, 5)}
    return {"messages": turns} | (more if form == "attributes" else {})


def measure(script: str, path: Path) -> Took:
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    seconds = time.perf_counter() - began
    return Took(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--form", default="messages", choices=["messages", "attributes", "completion", "text"]
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, asked.rows, asked.form)
        print(f"{asked.rows:,} rows of {asked.form}, {path.stat().st_size / 1e6:.0f} MB")
        rounds = [(measure(BASE, path), measure(VOX, path)) for _ in range(asked.rounds)]
    for base, vox in rounds:
        print(
            f"json.loads {base.processor:.2f} s ({base.seconds:.2f}), "
            f"stats {vox.processor:.2f} s ({vox.seconds:.2f}), {vox.megabytes:.0f} MB"
        )
    ratio = statistics.median(vox.processor / base.processor for base, vox in rounds)
    real = statistics.median(vox.seconds / base.seconds for base, vox in rounds)
    print(f"ratio {ratio:.2f} of processor time, {real:.2f} of real time (medians)")


if __name__ == "__main__":
    main()
