"""Compare the predictions of `vox plan` with runs of SmolLM2-135M.

    python benchmarks/plan_accuracy.py                   eight settings, two runs of each
    python benchmarks/plan_accuracy.py --only bf16       one of them
    python benchmarks/plan_accuracy.py --repeats 1       quicker, and blind to noise
    python benchmarks/plan_accuracy.py --longer 5        of five times as many rows

Each setting is planned (`--measure`), and run by `vox train --plan`, in fresh processes, in turn:
plan, run, plan, run, ... so that what other work on the machine does to the time is seen in the
scatter, and meets both alike. What is compared:

    steps, tokens   the plan's against the sums over the `step` lines of the run's telemetry; exact
    memory          against the most that was resident at once (VmHWM), as in benchmarks/memory.py
    time            of the whole run (loading, steps, validations), against what `vox train` says of
                    itself; each run against the plan that was made just before it
    merge           memory alone, for the settings that say so

Writes benchmarks/results/plan_accuracy.json, and exits with 1 where steps or tokens are not exact,
memory is off by more than 15 %, or the median of the times by more than 30 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results" / "plan_accuracy.json"
MODEL = "smollm2-135m"
MEMORY, TIME = 0.15, 0.30
"""How far a prediction and a run may be apart, as a share of the smaller one."""


class Setting(NamedTuple):
    """A setting to plan and run.

    Args:
        flags: of `vox plan`.
        lengths: of the documents, in words; they are gone through in turn.
        rows: how many.
        merged: the run is merged, too.
    """

    flags: dict[str, object]
    lengths: tuple[int, ...] = (20, 45, 80, 10)
    rows: int = 32
    merged: bool = False


# Steep enough for an adapter that bfloat16 does not round away.
_STEEP = {"lr": 5e-3, "warmup": 0}
SETTINGS: dict[str, Setting] = {
    "bf16": Setting({"dtype": "bf16", **_STEEP}, merged=True),
    "fp32": Setting({"dtype": "fp32"}),
    "seq-len": Setting({"dtype": "bf16", "seq-len": 96, "epochs": 1.5}, (20, 120, 45), 24),
    "micro-batch": Setting({"dtype": "bf16", "micro-batch-tokens": 128}),
    "checkpointing": Setting({"dtype": "bf16", "gradient-checkpointing": True}, (150, 250), 12),
    "nf4": Setting({"dtype": "bf16", "quant": "nf4"}),
    "rank": Setting({"dtype": "bf16", "rank": 64, **_STEEP}, merged=True),
    "batch-size": Setting({"dtype": "bf16", "batch-size": 12, "max-steps": 4, "seed": 3}),
}


def main() -> int:
    arguments = _arguments()
    names = arguments.only or list(SETTINGS)
    found: dict[str, list[dict[str, object]]] = {name: [] for name in names}
    began = time.perf_counter()
    for _ in range(arguments.repeats):
        for name in names:
            setting = SETTINGS[name]
            setting = setting._replace(rows=arguments.longer * setting.rows)
            found[name].append(once(setting, arguments.backend))
            show(name, found[name][-1])
    told = {name: summed(each) for name, each in found.items()}
    table(told)
    print(f"{time.perf_counter() - began:.0f} s in all")
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "backend": arguments.backend}
    RESULTS.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps({**machine, "settings": told}, indent=2) + "\n")
    return 0 if all(each["holds"] for each in told.values()) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--only", action="append", choices=SETTINGS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--longer", type=int, default=1, help="so many times as many rows")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def once(setting: Setting, backend: str) -> dict[str, object]:
    """Plan, run, and what either says."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows = [text_row(number, setting) for number in range(setting.rows)]
        (place / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (place / "valid.jsonl").write_text("\n".join(map(json.dumps, rows[:6])))
        flags = {"model": MODEL, "backend": backend, "batch-size": 4, **setting.flags}
        line = [part for flag, value in flags.items() for part in _typed(flag, value)]
        planned = vox(place, "plan", "--data", ".", "--measure", "--json", *line)
        (place / "plan.json").write_text(planned.out)
        report = vox(place, "train", "--plan", "plan.json", "--out", "run", "--json")
        merged = vox(place, "merge", "run", "--json") if setting.merged else None
        run = (place / "run" / "telemetry.jsonl").read_text()
    steps = [each for each in map(json.loads, run.splitlines()) if each["event"] == "step"]
    plan, work = json.loads(planned.out), json.loads(planned.out)["steps"]["work"]
    told = {
        "steps": [plan["steps"]["total"], len(steps)],
        "tokens": [work["tokens"], sum(step["tokens"] for step in steps)],
        "trained_tokens": [work["trained_tokens"], sum(s["trained_tokens"] for s in steps)],
        "memory": [plan["memory"]["peak"], report.memory],
        "time": [round(whole(plan["speed"]), 2), round(json.loads(report.out)["seconds"], 2)],
        "steps_alone": [
            round(plan["speed"]["seconds"], 2),
            round(sum(step["seconds"] for step in steps), 2),
        ],
    }
    if merged:
        told["merge"] = [plan["merge"]["memory"]["peak"], merged.memory]
    return told


def whole(speed: dict[str, float]) -> float:
    """Seconds of the run: steps, loading, validations."""
    return speed["seconds"] + (speed["loading"] or 0) + (speed["validating"] or 0)


def text_row(number: int, setting: Setting) -> dict[str, str]:
    words = setting.lengths[number % len(setting.lengths)]
    return {"prompt": f"{number} " + "word " * (words // 2), "completion": "word " * (words // 2)}


def _typed(flag: str, value: object) -> list[str]:
    return [f"--{flag}"] if value is True else [f"--{flag}", str(value)]


class Done(NamedTuple):
    """Output and peak resident memory (bytes) of a command."""

    out: str
    memory: int | None


# The command in a process that ends by saying what it took.
_CHILD = """
import atexit, os, re, sys
pipe = int(sys.argv[1])
def told():
    status = open("/proc/self/status").read()
    os.write(pipe, re.search(r"VmHWM:\\s*(\\d+)", status)[1].encode())
if os.path.exists("/proc/self/status"):
    atexit.register(told)
from vox_core.cli import main
sys.argv[:] = ["vox", *sys.argv[2:]]
main()
"""


def vox(place: Path, *arguments: str) -> Done:
    """Run a command in a process of its own, without settings of the C library's allocator."""
    environ = {k: v for k, v in os.environ.items() if not re.match("MALLOC_|VOX_TRAIN_", k)}
    reading, writing = os.pipe()
    command = [sys.executable, "-c", _CHILD, str(writing), *arguments]
    done = subprocess.run(
        command,
        cwd=place,
        env=environ,
        text=True,
        capture_output=True,
        pass_fds=(writing,),
        check=False,
    )
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    if done.returncode:
        sys.exit(f"vox {' '.join(arguments)}: {done.stderr[-2000:]}")
    return Done(done.stdout, 1024 * int(said) if said else None)


def summed(runs: list[dict[str, list[float]]]) -> dict[str, object]:
    """All repeats of one setting."""
    exact = all(run[key][0] == run[key][1] for run in runs for key in _EXACT)
    memory = [ratio for run in runs if (ratio := _ratio(run["memory"]))]
    times = [ratio for run in runs if (ratio := _ratio(run["time"]))]
    merges = [ratio for run in runs if "merge" in run and (ratio := _ratio(run["merge"]))]
    near = all(max(each, 1 / each) <= 1 + MEMORY for each in (*memory, *merges))
    time = statistics.median(times)
    holds = exact and near and max(time, 1 / time) <= 1 + TIME
    ratios = {"memory": memory, "merge": merges, "time": times}
    ratios["steps_alone"] = [_ratio(run["steps_alone"]) for run in runs]
    return {"holds": holds, "exact": exact, "ratios": ratios, "runs": runs}


_EXACT = ("steps", "tokens", "trained_tokens")


def _ratio(pair: list[float]) -> float | None:
    """Foretold over measured."""
    return round(pair[0] / pair[1], 3) if pair[1] else None


def show(name: str, run: dict[str, object]) -> None:
    print(f"{name:14} " + "  ".join(f"{key} {a} / {b}" for key, (a, b) in run.items()), flush=True)


def table(told: dict[str, dict]) -> None:
    columns = ("memory", "merge", "time", "steps_alone")
    print(f"\n{'planned / real':14} exact  " + "".join(f"{name:16}" for name in columns))
    for name, each in told.items():
        cells = [" ".join(f"{ratio:.2f}" for ratio in each["ratios"][key]) for key in columns]
        print(
            f"{name:14} {'yes' if each['exact'] else 'NO':6} "
            + "".join(f"{cell:16}" for cell in cells)
            + ("" if each["holds"] else "DOES NOT HOLD")
        )


if __name__ == "__main__":
    sys.exit(main())
