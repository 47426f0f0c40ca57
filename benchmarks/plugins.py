"""Time `vox --help` and `vox plugin list` with 20 plugins among 300 distributions.

Twenty made-up plugins and 280 other distributions (metadata, and for each plugin a package with a
manifest that must not be imported) lie in temporary folders on PYTHONPATH. Each command runs with
the plugins and without them, beside `python -c pass`; rounds are interleaved, so that a busy
machine slows all of them, and ratios are taken round by round. Prints one line for people and one
of JSON. This is no test: a clock says as much about the machine as about vox.

    .venv/bin/python benchmarks/plugins.py [ROUNDS]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

PLUGINS, OTHERS, ROUNDS = 20, 280, 15
VOX = str(Path(sys.executable).with_name("vox"))
MANIFEST = """
id = "{id}"
name = "{id}"
version = "1.0"
api = "1.0"
licence = "MIT"
[capabilities]
devices = ["cpu"]
quantisations = ["none"]
dtypes = ["fp32"]
methods = ["lora"]
families = "*"
[probe]
file = "probe.py"
[[commands]]
name = "{id}"
help = "What {id} does."
entry = "vox_{id}.cli:command"
"""


def describe(folder: Path, name: str, entry_points: str) -> None:
    """Write the metadata of one distribution."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text(entry_points)


def others(folder: Path) -> Path:
    """Distributions that have nothing to do with vox."""
    for number in range(OTHERS):
        describe(folder, f"other_{number}", f"[console_scripts]\nother{number} = other:main\n")
    return folder


def plugins(folder: Path) -> Path:
    """Distributions that are plugins."""
    for number in range(PLUGINS):
        name = f"bench_plugin_{number}"
        describe(folder, name, f"[vox_core.plugins]\nbench{number} = {name}:backend\n")
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('imported')\n")
        (folder / name / "probe.py").touch()
        (folder / name / "vox_plugin.toml").write_text(MANIFEST.format(id=f"bench{number}"))
    return folder


def seconds(command: list[str], *path: Path) -> float:
    """Wall time of one run with these folders on the path."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environ)
    return time.perf_counter() - start


def measure(rounds: int, folder: Path) -> dict[str, float]:
    """Medians in milliseconds, and medians of the rounds' ratios."""
    ours, theirs = plugins(folder / "plugins"), others(folder / "others")
    runs: dict[str, tuple[list[str], list[Path]]] = {
        "help_with": ([VOX, "--help"], [ours, theirs]),
        "help_without": ([VOX, "--help"], [theirs]),
        "list_with": ([VOX, "plugin", "list"], [ours, theirs]),
        "list_without": ([VOX, "plugin", "list"], [theirs]),
        "click": ([sys.executable, "-c", "import click"], [theirs]),
        "python": ([sys.executable, "-c", "pass"], []),
    }
    table = [
        {name: seconds(command, *path) for name, (command, path) in runs.items()}
        for _ in range(rounds + 1)
    ][1:]  # the first round writes and reads caches
    return {
        "rounds": rounds,
        **{f"{name}_ms": round(1e3 * median(row[name] for row in table), 1) for name in runs},
        "help_with_to_without": ratio(table, "help_with", "help_without"),
        "help_with_to_python": ratio(table, "help_with", "python"),
        "help_with_to_click": ratio(table, "help_with", "click"),
        "list_with_to_without": ratio(table, "list_with", "list_without"),
    }


def ratio(table: list[dict[str, float]], one: str, other: str) -> float:
    """Median of the rounds' ratios."""
    return round(median(row[one] / row[other] for row in table), 2)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = measure(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS, Path(folder))
    print(
        f"{PLUGINS} plugins among {PLUGINS + OTHERS} distributions: vox --help "
        f"{result['help_with_ms']} ms ({result['help_with_to_without']} of that without plugins, "
        f"{result['help_with_to_python']} of python -c pass, {result['help_with_to_click']} of "
        f"import click), vox plugin list "
        f"{result['list_with_ms']} ms ({result['list_with_to_without']} of that without plugins)"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
