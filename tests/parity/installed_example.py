"""An example backend as a third party's package: installed into an environment of its own, and used
through `vox` in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from tests.core.author_env import Environment
from vox_testing.tiny import make_model

Vox: TypeAlias = Callable[..., str]
"""`vox(...)` -> stdout."""


def installed(example: Path, folder: Path) -> Environment:
    """Install an example beside this environment's packages."""
    made = Environment(folder)
    made.install_editable(example)
    return made


def vox_in(environment: Environment) -> Vox:
    def run(*arguments: str) -> str:
        done = environment.run("-m", "vox_core.cli", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def runs_of(vox: Vox, folder: Path, backends: Sequence[str], steps: int) -> dict[str, Path]:
    """Train a tiny model under one contract; backend -> its run."""
    base, data = make_model("llama", folder / "base"), folder / "train.jsonl"
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n * n}."} for n in range(8)]
    data.write_text("\n".join(map(json.dumps, rows)))
    numbers = ("--dtype", "fp32", "--max-steps", str(steps), "--batch-size", "2", "--lr", "1e-2")
    made = {backend: folder / backend for backend in backends}
    for backend, out in made.items():
        to = ("--backend", backend, "--out", str(out))
        vox("train", str(data), "--model", str(base), *numbers, "--rank", "4", *to)
    return made


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "telemetry.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]
