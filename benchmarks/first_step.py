"""Profile the start of `vox train`: time per phase until the first step is done.

Each round starts the command anew in a process that notes when the functions of `PHASES` end, and
stops after the first step. The table has, for each phase, the median over the rounds of wall time
and of the processor time of that process. Everything is warm: the first round is thrown away.

    .venv/bin/python benchmarks/first_step.py [ROUNDS] [--against CHECKOUT] [-- FLAGS OF vox train]

`--against` names a checkout of another version with a `.venv` of its own, whose own copy of this
script knows that version's functions; rounds of both take turns, so that a busy machine slows
both, and the ratio is taken round by round. This is no test: a clock says as much about the machine
as about vox (tests/architecture/test_startup.py holds what a run imports).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "vox_core/quickstart/data/train.jsonl"
FLAGS = ["--model", "smollm2-135m", "--data", str(DATA), "--backend", "cpu"]
FLAGS += ["--max-steps", "3", "--batch-size", "2"]
ROUNDS = 5

PHASES = {
    "vox_core.library:_keywords": "Python, the command line",
    "vox_core.run.inputs:chosen_rows": "the run's modules, settings, data read",
    "vox_core.host.select:choose": "backend chosen",
    "vox_core.run.run_plan:read_inputs": "model found, its headers read, backend loaded",
    "vox_core.run.run_plan:build_datasets": "tokens found in the cache, or made",
    "vox_core.run.train:plan_run": "model identified, run planned",
    "vox_core.run.session:Session._announce": "run folder begun",
    "vox_torch.train:load_base": "torch, transformers and PEFT imported, base loaded",
    "vox_torch.train:fuse": "adapter put into it",
    "vox_torch.trial:loss_of": "the trial of end to end",
    "vox_torch.train:TorchTrainer.add_learner": "optimizer made",
    "vox_torch.train:TorchTrainer.update": "first step",
}
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
LAST = "vox_torch.train:TorchTrainer.update"


# --- in the process that is measured --------------------------------------------------------------


class Marks:
    """Notes when functions end, as their modules are imported."""

    def __init__(self, out: Path) -> None:
        self._out, self._marks = out, list[tuple[str, float, float]]()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Of the import system: the module's own, with its functions watched from then on."""
        watched = [place for place in PHASES if place.partition(":")[0] == name]
        if not watched:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec and spec.loader:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), self._watch(module, watched))
        return spec

    def _watch(self, module: Any, places: list[str]) -> None:
        for place in places:
            *owners, name = place.partition(":")[2].split(".")
            owner = functools.reduce(getattr, owners, module)
            if function := getattr(owner, name, None):
                setattr(owner, name, self._noting(function, place))

    def _noting(self, function: Callable[..., Any], place: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            finally:
                self._marks.append((PHASES[place], age(), time.process_time()))
                if place == LAST:
                    self._out.write_text(json.dumps(self._marks))
                    os._exit(0)

        return noting


def age() -> float:
    """Seconds since this process began (Linux)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def child(out: Path, arguments: list[str]) -> None:
    """`vox train`, as the command does it, up to the first step."""
    sys.meta_path.insert(0, Marks(out))  # type: ignore[arg-type]
    from vox_core.cli import main

    main(["train", *arguments])


# --- in the process that measures -----------------------------------------------------------------


def one_round(checkout: Path, flags: list[str]) -> dict[str, tuple[float, float]]:
    """Phase -> its own (wall, processor) seconds, in order; `total` is the last."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "marks.json"
        python, script = checkout / ".venv/bin/python", checkout / "benchmarks/first_step.py"
        command = [str(python), str(script), "--child", str(out), "--", *flags]
        command += ["--out", str(Path(scratch) / "run")]
        # Without this, each start compiles the sources of all libraries anew: nothing is warm.
        kept = {name: said for name, said in os.environ.items() if name != _NO_BYTECODE}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=kept)
        if not out.exists():
            sys.exit(f"no first step with {checkout}:\n{done.stderr}")
        marks = json.loads(out.read_text())
    phases: dict[str, tuple[float, float]] = {}
    before = (0.0, 0.0)
    for phase, wall, processor in marks:
        had = phases.get(phase, (0.0, 0.0))
        phases[phase] = (had[0] + wall - before[0], had[1] + processor - before[1])
        before = (wall, processor)
    return {**phases, "total": before}


def table(rounds: list[dict[str, tuple[float, float]]]) -> str:
    """Medians, one line a phase."""
    lines = [f"{'':36}  wall s  processor s"]
    for phase in rounds[-1]:
        wall, processor = (
            statistics.median(each.get(phase, (0.0, 0.0))[i] for each in rounds) for i in (0, 1)
        )
        lines.append(f"{phase:36}  {wall:6.2f}  {processor:6.2f}")
    return "\n".join(lines)


def ratio(ours: list[Any], theirs: list[Any], which: int) -> float:
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(a["total"][which] / b["total"][which] for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    own, _, flags = (
        (sys.argv[1:], "", [])
        if "--" not in sys.argv
        else (sys.argv[1 : sys.argv.index("--")], "", sys.argv[sys.argv.index("--") + 1 :])
    )
    given = parser.parse_args(own)
    if given.child:
        child(given.child, flags)
        return
    checkouts = [ROOT, *([given.against.resolve()] if given.against else [])]
    rounds: dict[Path, list[dict[str, tuple[float, float]]]] = {each: [] for each in checkouts}
    for number in range(given.rounds + 1):
        for checkout in checkouts:
            found = one_round(checkout, flags or FLAGS)
            if number:
                rounds[checkout].append(found)
    for checkout in checkouts:
        print(f"{'this version' if checkout == ROOT else checkout}\n{table(rounds[checkout])}\n")
    if given.against:
        ours, theirs = rounds.values()
        print(
            f"ratio of the totals: wall {ratio(ours, theirs, 0):.2f}, "
            f"processor {ratio(ours, theirs, 1):.2f} (median of {given.rounds} rounds)"
        )


if __name__ == "__main__":
    main()
