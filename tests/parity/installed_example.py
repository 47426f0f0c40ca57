"""An example backend as a third party's package: installed into an environment of its own, and used
through `vox` in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from tests.core.author_env import Environment
from vox_testing.tiny import make_model

Vox: TypeAlias = Callable[..., list[str]]
"""`vox([...], [...])` -> stdout of each command, which run in one process."""
_COMMANDS = """
import contextlib, io, json, sys
from vox_core.cli import failures, prepare, root

prepare()
printed = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if code := failures.run(root, command):
            sys.exit(code)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


def installed(example: Path, folder: Path) -> Environment:
    """Install an example beside this environment's packages."""
    made = Environment(folder)
    made.install_editable(example)
    return made


def vox_in(environment: Environment) -> Vox:
    def run(*commands: Sequence[str]) -> list[str]:
        done = environment.run("-c", _COMMANDS, json.dumps(commands))
        assert done.returncode == 0, done.stderr
        printed: list[str] = json.loads(done.stdout)
        return printed

    return run


def runs_of(vox: Vox, folder: Path, backends: Sequence[str], steps: int) -> dict[str, Path]:
    """Train a tiny model under one contract; backend -> its run."""
    base, data = make_model("llama", folder / "base"), folder / "train.jsonl"
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n * n}."} for n in range(8)]
    data.write_text("\n".join(map(json.dumps, rows)))
    numbers = ("--dtype", "fp32", "--max-steps", str(steps), "--batch-size", "2", "--lr", "1e-2")
    made = {backend: folder / backend for backend in backends}
    how = ("train", str(data), "--model", str(base), *numbers, "--rank", "4")
    vox(*[(*how, "--backend", backend, "--out", str(out)) for backend, out in made.items()])
    return made


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "telemetry.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]
