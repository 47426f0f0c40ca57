"""SIGKILL at random moments of an evaluation and of data generation: the same bytes in the end.

    python benchmarks/killed.py [--times 20]

A tiny model, in float32. Each time a process is killed at a random moment of its work, the same
call goes on in the folder, and its files are compared with those of an undisturbed one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from vox_core.api.commands import EvalSettings
from vox_data import generate as generation
from vox_eval import evaluation
from vox_testing.llama import write_llama

SUITE = """name = "s"
[[task]]
id = "say"
rows = "say.jsonl"
scorer = { name = "repair", check = "exact", rounds = 1 }
sampling = { max-tokens = 12, temperature = 1 }
[[task]]
id = "text"
rows = "text.jsonl"
scorer = "perplexity"
"""
RECIPE = """template = ["Say {n}."]
[values]
n = [{numbers}]
[sampling]
max-tokens = 12
temperature = 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    times = parser.parse_args().times
    evaluation.BLOCK = generation.BLOCK = 4
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        model = str(write_llama(Path("base")))
        rows = [{"prompt": f"Say {n}.", "ideal": str(n)} for n in range(60)]
        Path("say.jsonl").write_text("\n".join(map(json.dumps, rows)))
        texts = [{"text": f"A text with number {n}. " * 9} for n in range(20)]
        Path("text.jsonl").write_text("\n".join(map(json.dumps, texts)))
        Path("suite.toml").write_text(SUITE)
        Path("recipe.toml").write_text(RECIPE.replace("{numbers}", ", ".join(map(str, range(80)))))

        def evaluated(out: str) -> None:
            settings = EvalSettings(
                suite=(Path("suite.toml"),), dtype="fp32", backend="cpu", out=Path(out)
            )
            evaluation.evaluate_and_compare(model, settings, observe=lambda _: None)

        def generated(out: str) -> None:
            recipe = Path("recipe.toml")
            generation.generate(
                model, recipe, Path(out), backend="cpu", dtype="fp32", observe=lambda _: None
            )

        for name, work in (("evaluation", evaluated), ("generation", generated)):
            _tried(name, work, times)


def _tried(name: str, work: Callable[[str], None], times: int) -> None:
    rng, equal, moments = random.Random(0), 0, list[int]()
    began = time.perf_counter()
    _process(work, f"{name}-whole", None)
    whole, took = _files(f"{name}-whole"), time.perf_counter() - began
    while len(moments) < times:
        out = f"{name}-{rng.random()}"
        if not _process(work, out, rng.uniform(0.1, 1) * took):
            continue  # it had ended before
        file = next(iter(Path(out).glob("*.jsonl")), None)
        moments.append(file.read_bytes().count(b"\n") if file else 0)
        _process(work, out, None)
        found = _files(out)
        for file in {*found, *whole}:
            if found.get(file) != whole.get(file):
                print(
                    name, out, file, (found.get(file) or b"")[:300], (whole.get(file) or b"")[:300]
                )
        equal += found == whole
    print(f"{name}: {equal} of {times} equal; lines when killed {sorted(moments)}", flush=True)


def _process(work: Callable[[str], None], out: str, seconds: float | None) -> bool:
    """Do the work in a process; kill it after some time. Return whether that came in time."""
    if (pid := os.fork()) == 0:
        try:
            work(out)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - a child never returns
            print(repr(error), file=sys.stderr)
            os._exit(1)
    until = time.perf_counter() + (seconds or 1e9)
    while time.perf_counter() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if status:
                raise SystemExit("the work failed")
            return False
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def _files(out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(out).glob("[!.]*")}


if __name__ == "__main__":
    main()
