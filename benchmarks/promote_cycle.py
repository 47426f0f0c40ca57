"""A whole cycle on SmolLM2: train on a task of reasoning-gym, evaluate, promote, serve, roll back.

    pip install reasoning-gym==0.1.25
    python benchmarks/promote_cycle.py FOLDER

The task is `chain_sum`: sums and differences of two numbers of up to two digits, answered by the
number alone. Every step is a command of vox's; the folder keeps rows, runs, evaluations and the
registry, so that a second call continues. Exits with 1 if an answer is not the expected one:

    trained on 500 rows, over the base model        yes
    the same with shuffled answers                  no
    the same two models on 10 held-out rows         not enough evidence: a cycle has 5
    merged, over the run                            yes, as not inferior
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
SYSTEM = {"role": "system", "content": "Answer with the number."}
SUITE = """name = "{name}"
[[task]]
id = "sums"
rows = "{name}.jsonl"
scorer = "numeric"
sampling = {{ max-tokens = 5 }}
"""
GATE = """name = "{name}"
suites = ["{suite}.toml"]
[[require]]
task = "sums"
{require}
"""
GATES = {
    "gate": ("production", "held-out", "superior = 0.05"),
    "merged": ("production", "held-out", "not-inferior = 0.1\n[limits]\nleakage = 1"),
    "ten": ("ten", "held-out-10", "superior = 0.05"),
}
TRAIN = ("--lr", "1e-3", "--batch-size", "16", "--seed", "1", "--epochs", "1")


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    write_rows()
    for name in ("sums", "shuffled"):
        if not Path("runs", name, "vox_adapter.json").exists():
            data = ("--data", f"{name}.jsonl", "--out", f"runs/{name}")
            vox("train", "--model", BASE, *data, *TRAIN)
    vox("eval", "runs/sums", "--suite", "held-out.toml", "--against", BASE)
    if not Path("runs/sums-merged").exists():
        vox("merge", "runs/sums")
    answers = {
        "yes": answer("sums", "gate", "--over", BASE),
        "no": answer("shuffled", "gate", "--over", BASE),
        "not enough evidence": answer("sums", "ten", "--over", BASE),
        "yes, merged": f"{answer('sums-merged', 'merged')}, merged",
    }
    wrong = [
        f"{found} instead of {expected}" for expected, found in answers.items() if found != expected
    ]
    vox("promote", "production", "--verify")
    vox("registry", "list")
    vox("registry", "rollback", "production")
    vox("registry", "show", "production")
    if served("production") != served("runs/sums"):
        wrong.append("production does not answer as the run")
    print("as expected" if not wrong else f"not as expected: {'; '.join(wrong)}")
    return int(bool(wrong))


def write_rows() -> None:
    """500 training rows, and all with shuffled answers; 80 other rows, and 10 of them."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    made = reasoning_gym.create_dataset("chain_sum", size=1500, seed=1, **options)
    pairs = {each["metadata"]["expression"]: str(each["answer"]) for each in made}
    rows = [(f"{question} =", each) for question, each in pairs.items()]
    train, held_out = rows[:500], rows[500:580]
    answers = [each for _, each in train]
    random.Random(0).shuffle(answers)
    write("sums", [trained(*row) for row in train])
    write("shuffled", [trained(row[0], each) for row, each in zip(train, answers, strict=True)])
    for name, some in (("held-out", held_out), ("held-out-10", held_out[:10])):
        write(name, [{"messages": [SYSTEM, user(each)], "ideal": right} for each, right in some])
        Path(f"{name}.toml").write_text(SUITE.format(name=name))
    for name, (moved, suite, require) in GATES.items():
        text = GATE.format(name=moved, suite=suite, require=require)
        Path(f"{name}.toml").write_text(text)


def trained(question: str, right: str) -> dict[str, Any]:
    return {"messages": [SYSTEM, user(question), {"role": "assistant", "content": right}]}


def user(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def vox(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command; print it with its output."""
    command = [sys.executable, "-m", "vox_core.cli", *map(str, words)]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(f"$ vox {' '.join(command[3:])}\n{done.stdout.rstrip()}", flush=True)
    print(f"({time.perf_counter() - began:.0f} s, exit code {done.returncode})\n", flush=True)
    return done


def answer(run: str, gate: str, *over: str) -> str:
    done = vox("promote", f"runs/{run}", "--gate", f"{gate}.toml", *over)
    found = re.search(r"^answer: (yes|not enough evidence|no)", done.stdout, re.M)
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
            answers = [ask(found[0], row["messages"]) for row in rows]
        finally:
            server.terminate()
    print(
        f"vox serve {reference}: {answers}; right: {[row['ideal'] for row in rows]}\n",
        flush=True,
    )
    return answers


def ask(address: str, messages: list[dict[str, str]]) -> str:
    with urllib.request.urlopen(f"{address}/v1/models") as reply:
        name = json.load(reply)["data"][0]["id"]
    body: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": 5}
    body["messages"] = messages
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
