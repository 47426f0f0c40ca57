"""A whole cycle on SmolLM2: train on a task of reasoning-gym, evaluate, promote, serve, roll back.

    pip install reasoning-gym==0.1.25
    python benchmarks/promote_cycle.py FOLDER

The task is `chain_sum`: sums and differences of two numbers of up to three digits, answered by the
number alone. Every step is a command of vox's; the folder keeps rows, runs, evaluations and the
registry, so that a second call continues. Exits with 1 if an answer is not the expected one:

    trained on 500 rows                     yes, over the base model
    trained on the same with shuffled answers       no
    the same two models on 10 held-out rows         not enough evidence
    served as `production`, and after a roll back   answers of the run that the name stands for
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import reasoning_gym

BASE = "smollm2-135m"
PROMPT = "What is {}? Answer with the number alone."
SUITE = """name = "{name}"
[[task]]
id = "sums"
rows = "{rows}.jsonl"
scorer = "numeric"
sampling = {{ max-tokens = 8 }}
"""
GATE = """suites = ["{suite}.toml"]
{more}
[[require]]
task = "sums"
superior = 0.05
"""
TRAIN = ("--lr", "1e-3", "--batch-size", "16", "--seed", "1")


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    write_rows()
    wrong = 0
    for name, rows, epochs in (
        ("first", "train-100", 1),
        ("sums", "train", 3),
        ("shuffled", "shuffled", 3),
    ):
        if not Path("runs", name, "vox_adapter.json").exists():
            vox(
                "train",
                "--model",
                BASE,
                "--data",
                f"{rows}.jsonl",
                "--out",
                f"runs/{name}",
                "--epochs",
                epochs,
                *TRAIN,
            )
    vox("eval", "runs/sums", "--suite", "held-out.toml", "--against", BASE)
    wrong += answer("first", "gate.toml", BASE) != "yes"
    wrong += answer("sums", "gate.toml", BASE) != "yes"
    wrong += answer("shuffled", "gate.toml", BASE) != "no"
    wrong += answer("sums", "gate-10.toml", BASE) != "not enough evidence"
    vox("registry", "show", "production")
    wrong += vox("promote", "production", "--verify").returncode
    own, before = served("production"), vox("registry", "rollback", "production")
    wrong += before.returncode + (own != served("runs/sums"))
    wrong += served("production") != served("runs/first")
    print("as expected" if not wrong else f"{wrong} answers are not as expected")
    return int(wrong > 0)


def write_rows() -> None:
    """500 training rows, 100 of them, all with shuffled answers; 300 other rows, and 10 of them."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}
    made = reasoning_gym.create_dataset("chain_sum", size=1000, seed=1, **options)
    pairs = {each["metadata"]["expression"]: str(each["answer"]) for each in made}
    rows = [
        {"prompt": PROMPT.format(question), "completion": each} for question, each in pairs.items()
    ]
    train, held_out = rows[:500], rows[500:800]
    answers = [each["completion"] for each in train]
    random.Random(0).shuffle(answers)
    shuffled = [{**each, "completion": other} for each, other in zip(train, answers, strict=True)]
    files = {
        "train": train, "train-100": train[:100], "shuffled": shuffled,
        "held-out": held_out, "held-out-10": held_out[:10],
    }  # fmt: skip
    for name, some in files.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in some))
    for name in ("held-out", "held-out-10"):
        Path(f"{name}.toml").write_text(SUITE.format(name=name, rows=name))
    Path("gate.toml").write_text(GATE.format(suite="held-out", more=""))
    Path("gate-10.toml").write_text(GATE.format(suite="held-out-10", more='name = "ten"'))


def vox(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command; print it with its output."""
    command = [sys.executable, "-m", "vox_core.cli", *map(str, words)]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(f"$ vox {' '.join(command[3:])}\n{done.stdout.rstrip()}", flush=True)
    print(f"({time.perf_counter() - began:.0f} s, exit code {done.returncode})\n", flush=True)
    return done


def answer(run: str, gate: str, over: str) -> str:
    done = vox("promote", f"runs/{run}", "--gate", gate, "--over", over)
    found = re.search(r"^answer: (.*)$", done.stdout, re.M)
    return found[1] if found else "an error"


def served(reference: str) -> list[str]:
    """Answers of a server to the first held-out questions."""
    command = [sys.executable, "-m", "vox_core.cli", "serve", reference, "--port", "0"]
    lines = Path("held-out.jsonl").read_text().splitlines()[:5]
    rows = [json.loads(line) for line in lines]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout
        found = next(
            filter(None, (re.search(r"http://[\d.]+:\d+", line) for line in server.stdout))
        )
        try:
            answers = [ask(found[0], row["prompt"]) for row in rows]
        finally:
            server.terminate()
    print(
        f"vox serve {reference}: {answers}; right: {[row['completion'] for row in rows]}\n",
        flush=True,
    )
    return answers


def ask(address: str, prompt: str) -> str:
    with urllib.request.urlopen(f"{address}/v1/models") as reply:
        name = json.load(reply)["data"][0]["id"]
    body: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": 8}
    body["messages"] = [{"role": "user", "content": prompt}]
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
