"""Time `vox data mix` on a million short rows, against `wc -l` and `json.loads` of each.

    python benchmarks/mixing.py [ROWS]

Two sources of half the rows each are mixed into one file of as many rows as their weights allow,
each way in a process of its own, in turn, several times; printed are the processor time of each,
the median of the rounds' ratios and the mixture's peak of memory. What is aimed at is a ratio of 2,
and less than 1 GB.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from operator import truediv
from pathlib import Path

ROUNDS = 3
_READ = """
import json, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)
"""
_RECIPE = """
rows = {rows}
[[source]]
path = "a.jsonl"
weight = 0.5
[[source]]
path = "b.jsonl"
weight = 0.5
lane = "sums"
"""


def main(rows: int) -> None:
    """Measure, and print one line of JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [_written(folder / f"{which}.jsonl", which, rows // 2) for which in "ab"]
        (folder / "mix.toml").write_text(_RECIPE.format(rows=rows // 2 * 2))
        read, mixed, peaks, again = [], [], [], []
        for number in range(ROUNDS):
            out = folder / f"{number}.jsonl"
            read.append(_seconds(["wc", "-l", *sources]) + _seconds(_python(_READ, *sources)))
            mix = [sys.executable, "-m", "vox_core.cli", "data", "mix"]
            mix += [str(folder / "mix.toml"), "--out", str(out)]
            mixed.append(_seconds(mix, peaks))
            again.append(_seconds(mix))
        found = {
            "rows": rows,
            "wc and json.loads": [round(each, 2) for each in read],
            "mix": [round(each, 2) for each in mixed],
            "ratio": round(statistics.median(map(truediv, mixed, read)), 2),
            "up to date": round(min(again), 2),
            "peak MB": round(max(peaks) / 1e6),
        }
        print(json.dumps(found))


def _written(path: Path, which: str, rows: int) -> str:
    random_of = random.Random(which)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            other = random_of.randrange(1000)
            question = f"What is {number} and {other} ({which})?"
            turns = [("user", question), ("assistant", f"It is {number + other}.")]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return str(path)


def _python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def _seconds(command: list[str], peaks: list[float] | None = None) -> float:
    """Processor time of a command; its peak of memory goes to `peaks`."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} failed")
    if peaks is not None:
        peaks.append(used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
