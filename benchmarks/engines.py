"""`vox serve --engine` with the real programs: what they compute, how steadily, and `kill -9`.

    VLLM_CPU_KVCACHE_SPACE=1 python benchmarks/engines.py RUN vllm /path/to/venv/bin/python \\
        --engine-args "--enforce-eager --max-model-len 1024"
    python benchmarks/engines.py RUN llama.cpp /path/to/venv/bin/python
    python benchmarks/engines.py RUN vox

Each call starts one server with the run and prints:

- the line of the start with the comparison with `probe.json`;
- greedy answers of the run and of its base with their first log-probabilities, to compare between
  engines;
- how far the log-probabilities of an answer move between alone and four at once, to hold against
  `NOISE` in `vox_engines/proxy.py`;
- with a program: how long after `kill -9` of it a streaming client gets its error, and the server
  answers again, and whether a process is left after SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import httpx2

QUESTION = "What is your return policy?"
ORPHANS = 5.0
"""Seconds in which the system reaps processes that were killed."""


def main() -> None:
    """Start a server, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("engine", choices=["vox", "vllm", "llama.cpp"])
    parser.add_argument("python", nargs="?")
    parser.add_argument("--engine-args", default="")
    parser.add_argument("--dtype", default="fp32")
    given = parser.parse_args()
    command = [sys.executable, "-m", "vox_core.cli", "serve", given.run, "--port", "0"]
    command += ["--engine", given.engine, "--dtype", given.dtype]
    command += ["--engine-args", given.engine_args] if given.engine_args else []
    command += ["--engine-python", given.python] if given.python else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[1]
        with httpx2.Client(base_url=url, timeout=600) as client:
            names = [each["id"] for each in client.get("/models").json()["data"]]
            print(*(server.stdout.readline() for _ in range(len(names))), sep="", end="")
            measure(client, names)
            if given.engine != "vox":
                kill(client, names[0], server.pid)
        processes = descendants(server.pid)
        server.terminate()
        server.wait()
    ended = perf_counter()
    while (left := alive(processes)) and perf_counter() - ended < ORPHANS:
        sleep(0.1)
    print(f"SIGTERM: exit code {server.returncode}, processes left {left}")


def ask(client: httpx2.Client, model: str) -> Any:
    """Return a greedy answer."""
    return client.post("/chat/completions", json=asked(model)).raise_for_status().json()


def asked(model: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a request."""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 24}
    return {**body, "logprobs": True, **fields}


def log_probs(answer: Any) -> list[float]:
    """Return those of the chosen tokens."""
    return [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]


def measure(client: httpx2.Client, names: list[str]) -> None:
    """Compare an answer alone with four at once."""
    for name in names:
        alone = ask(client, name)
        print(name, repr(alone["choices"][0]["message"]["content"]))
        print(name, *(f"{each:.6f}" for each in log_probs(alone)[:6]))
        with ThreadPoolExecutor(4) as pool:
            batch = [*pool.map(lambda _, n=name: ask(client, n), range(4))]
        pairs = [zip(log_probs(alone), log_probs(each), strict=False) for each in batch]
        apart = max(abs(a - b) for each in pairs for a, b in each)
        print(f"{name}: log-probabilities alone and four at once up to {apart:.1e} nats apart")


def kill(client: httpx2.Client, name: str, server: int) -> None:
    """Kill the program in the middle of a stream."""
    minder = next(pid for pid in children(server) if b"minder.py" in cmdline(pid))
    (program,) = children(minder)
    body = asked(name, stream=True, max_tokens=400, logprobs=False, stop=["\0"])
    with client.stream("POST", "/chat/completions", json=body) as response:
        for count, line in enumerate(filter(None, response.iter_lines())):
            if count == 1:
                os.kill(program, signal.SIGKILL)
                killed = perf_counter()
            last = line
    error = json.loads(last.removeprefix("data: ")).get("error") if "{" in last else None
    print(f"kill -9: the client had its error after {perf_counter() - killed:.2f} s: {error}")
    while client.post("/chat/completions", json=asked(name)).status_code == 503:
        sleep(0.2)
    print(f"kill -9: the server answered again after {perf_counter() - killed:.0f} s")


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for task in tasks for each in task.read_text().split()]


def descendants(pid: int) -> list[int]:
    """Return those and theirs."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def alive(processes: list[int]) -> list[int]:
    """Return those that exist."""
    return [pid for pid in processes if Path(f"/proc/{pid}").exists()]


def cmdline(pid: int) -> bytes:
    """Return a process's command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


if __name__ == "__main__":
    main()
