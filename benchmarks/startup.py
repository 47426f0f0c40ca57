"""Wall time of `vox --help` against `python -c "import click"`, on this machine, now.

Rounds are interleaved, so that a busy machine slows both, and the ratio is taken round by round;
the median of ratios is the result. Prints one line for people and one of JSON. This is no test: a
clock says as much about the machine as about vox (tests/architecture/test_startup.py has the test).

    .venv/bin/python benchmarks/startup.py [ROUNDS]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

VOX = [str(Path(sys.executable).with_name("vox")), "--help"]
CLICK = [sys.executable, "-c", "import click"]
ROUNDS = 20


def seconds(command: list[str]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, float]:
    """Medians in milliseconds, and the median of the rounds' ratios."""
    seconds(VOX), seconds(CLICK)  # the first run of each writes and reads caches
    pairs = [(seconds(VOX), seconds(CLICK)) for _ in range(rounds)]
    return {
        "rounds": rounds,
        "vox_help_ms": round(1e3 * statistics.median(vox for vox, _ in pairs), 1),
        "import_click_ms": round(1e3 * statistics.median(click for _, click in pairs), 1),
        "ratio": round(statistics.median(vox / click for vox, click in pairs), 2),
    }


def main() -> None:
    result = measure(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
    print(
        f"vox --help {result['vox_help_ms']} ms, import click {result['import_click_ms']} ms, "
        f"ratio {result['ratio']} (median of {result['rounds']} rounds)"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
