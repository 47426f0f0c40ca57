"""`vox data check` of a million short rows against `wc -l` and `json.loads` of each line alone.

Each measurement has a process of its own, and its memory is the most that this process held. Rounds
are interleaved, so that a busy machine slows all, and ratios are taken round by round, of processor
time (user and system); wall time is shown beside it.

    python benchmarks/reading.py [--rows 1000000] [--rounds 3]
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
from collections.abc import Iterator
from pathlib import Path

WORDS = (
    "the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are",
    "as", "with", "his", "they", "at", "be", "this",
)  # fmt: skip
PEER = (
    "import json, subprocess, sys\n"
    "print(subprocess.run(['wc', '-l', sys.argv[1]], capture_output=True, text=True).stdout)\n"
    "with open(sys.argv[1], 'rb') as file:\n"
    "    for line in file:\n"
    "        json.loads(line)\n"
)
COMMANDS = {
    "wc -l and json.loads": ["-c", PEER],
    "vox data check": ["-m", "vox_core.cli", "data", "check"],
}


def rows(kind: str, number: int) -> Iterator[dict[str, object]]:
    """Short rows of one form; of 90 to 180 bytes."""
    rng = random.Random(1)
    for index in range(number):
        asked, said = " ".join(rng.choices(WORDS, k=8)), " ".join(rng.choices(WORDS, k=12))
        if kind == "messages":
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            yield {"messages": turns}
        elif kind == "pairs":
            rating, category = index % 5 + 0.5, rng.choice(["sql", "python"])
            yield {"prompt": asked, "response": said, "rating": rating, "category": category}
        else:
            yield {"instruction": asked, "input": "", "output": said, "id": index}


def measured(arguments: list[str], data: Path) -> tuple[float, float, int]:
    """Seconds of processor time, seconds, and megabytes of a process that succeeds."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments, str(data)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, arguments
    seconds = time.perf_counter() - began
    return usage.ru_utime + usage.ru_stime, seconds, usage.ru_maxrss >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("messages", "pairs", "Alpaca"):
            data = Path(folder) / f"{kind}.jsonl"
            with data.open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows(kind, options.rows))
            found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in COMMANDS}
            for _ in range(options.rounds):
                for name, arguments in COMMANDS.items():
                    found[name].append(measured(arguments, data))
            peer = [cpu for cpu, _, _ in found["wc -l and json.loads"]]
            print(f"{options.rows:,} rows of {kind}, {data.stat().st_size / 1e6:.0f} MB")
            for name, all_of_it in found.items():
                ratio = statistics.median(
                    cpu / other for (cpu, _, _), other in zip(all_of_it, peer, strict=True)
                )
                cpu, wall = (statistics.median(each[n] for each in all_of_it) for n in (0, 1))
                most = max(memory for _, _, memory in all_of_it)
                print(f"  {name:<22} {cpu:6.2f} s ({wall:6.2f} s wall)  x {ratio:.2f}  {most} MB")
            data.unlink()


if __name__ == "__main__":
    main()
