"""SIGKILL at random moments of an evaluation and of data generation: the same bytes in the end.

    python benchmarks/killed.py [--times 20]

A tiny model, in float32. A process is killed at a random moment between its first write and its
end; the same call in another process continues in the folder, and its files are compared with those
of an undisturbed one. Processes are forked from one that has imported everything.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from vox_data import generate as generation
from vox_eval import evaluation
from vox_eval.settings import EvalSettings
from vox_testing.llama import write_llama

SUITE = """name = "s"
[[task]]
id = "say"
rows = "say.jsonl"
scorer = { name = "repair", check = "exact", rounds = 1 }
sampling = { max-tokens = 16, temperature = 1 }
[[task]]
id = "text"
rows = "text.jsonl"
scorer = "perplexity"
"""
RECIPE = """template = ["Say {n}."]
[values]
n = [{numbers}]
[sampling]
max-tokens = 16
temperature = 1
"""


BLOCK = 8
"""Examples between two writes."""
PROCESSES = multiprocessing.get_context("forkserver")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    times = parser.parse_args().times
    os.environ["OMP_NUM_THREADS"] = "1"  # faster with this model
    PROCESSES.set_forkserver_preload(["torch", "transformers", "peft", __name__])
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write_llama(Path("base"))
        rows = [{"prompt": f"Say {n}.", "ideal": str(n)} for n in range(80)]
        Path("say.jsonl").write_text("\n".join(map(json.dumps, rows)))
        texts = [{"text": f"A text with number {n}. " * 9} for n in range(40)]
        Path("text.jsonl").write_text("\n".join(map(json.dumps, texts)))
        Path("suite.toml").write_text(SUITE)
        Path("recipe.toml").write_text(RECIPE.replace("{numbers}", ", ".join(map(str, range(120)))))
        for name in ("evaluation", "generation"):
            tried(name, times)


def work(name: str, out: str) -> None:
    """Evaluate or generate into a folder."""
    evaluation.BLOCK = generation.BLOCK = BLOCK
    if name == "evaluation":
        suite = (Path("suite.toml"),)
        settings = EvalSettings(suite=suite, dtype="fp32", backend="cpu", out=Path(out))
        evaluation.evaluate_and_compare("base", settings, observe=lambda _: None)
    else:
        how = {"backend": "cpu", "dtype": "fp32", "observe": lambda _: None}
        generation.generate("base", Path("recipe.toml"), Path(out), **how)


def tried(name: str, times: int) -> None:
    rng, equal, moments = random.Random(0), 0, list[str]()
    took = run(name, whole := f"{name}-whole", None)
    while len(moments) < times:
        out = f"{name}-{len(moments)}"
        if run(name, out, rng.uniform(0, took)) is not None:
            shutil.rmtree(out)  # it had ended before
            continue
        moments.append(lines(out))
        run(name, out, None)
        found, expected = files(out), files(whole)
        different = [file for file in {*found, *expected} if found.get(file) != expected.get(file)]
        equal += not different
        print("".join(f"{out}: {file} differs\n" for file in different), end="", flush=True)
    print(f"{name}: {equal} of {times} equal; lines when killed, of {lines(whole)}: {moments}")


def run(name: str, out: str, seconds: float | None) -> float | None:
    """Work in a process, and kill it some seconds after its first write; return the seconds from
    there to its end, None if it was killed."""
    process = PROCESSES.Process(target=work, args=(name, out))
    process.start()
    while not Path(out).exists() and process.is_alive():
        time.sleep(0.001)
    began = time.perf_counter()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    if process.exitcode:
        raise SystemExit("the work failed")
    return time.perf_counter() - began


def lines(out: str) -> str:
    """Return how many lines each JSONL file has."""
    paths = sorted(Path(out).glob("*.jsonl"))
    return "+".join(str(path.read_bytes().count(b"\n")) for path in paths)


def files(out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(out).glob("[!.]*")}


if __name__ == "__main__":
    main()
