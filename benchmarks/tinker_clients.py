"""Training clients of `vox tinker serve` at once, against the same clients one after another.

    python -m benchmarks.tinker_clients [--model smollm2-135m] [--dtype fp32] [--clients 4]

Each step of a client is a `forward_backward` with one document and an `optim_step`, through the
real SDK; it waits for both before the next one. Documents are random tokens. The turns of both ways
alternate. Prints tokens per second, and per processor second of the server, which other load on the
machine changes less; set OMP_NUM_THREADS=1 for these, since threads that wait count, too.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import tinker
from tinker import types

from benchmarks.tinker_skyrl import processor_seconds

ADAM = types.AdamParams(learning_rate=1e-4)
NAME = "base"


@contextmanager
def server(model: str, dtype: str, backend: str, runs: str) -> Iterator[tuple[str, int]]:
    command = [
        sys.executable, "-m", "vox_core.cli", "tinker", "serve", "--model", f"{NAME}={model}",
        "--backend", backend, "--dtype", dtype, "--port", "0", "--out", runs,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        url = next(line for line in started.stdout if "TINKER_BASE_URL" in line).split()[-1]
        yield url, started.pid
        started.terminate()


def datum(random: np.random.Generator, length: int) -> types.Datum:
    tokens = random.integers(0, 1000, length).tolist()
    given = {"target_tokens": tokens[1:], "weights": [1.0] * (length - 1)}
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), given)


def trained(client: tinker.TrainingClient, data: Sequence[types.Datum]) -> None:
    """Take a step with each datum."""
    for each in data:
        passed, stepped = client.forward_backward([each], "cross_entropy"), client.optim_step(ADAM)
        passed.result()
        stepped.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128])
    given = parser.parse_args()
    os.environ |= {"TINKER_API_KEY": "tml-benchmark", "TINKER_TELEMETRY": "0"}
    logging.getLogger("tinker").setLevel(logging.ERROR)
    random = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory() as runs,
        server(given.model, given.dtype, given.backend, runs) as (url, pid),
        ThreadPoolExecutor(given.clients) as pool,
    ):
        service = tinker.ServiceClient(base_url=url)
        clients = [
            service.create_lora_training_client(NAME, rank=given.rank, seed=seed).result()
            for seed in range(given.clients)
        ]

        def rates(way: str, length: int) -> tuple[float, float]:
            """Return tokens per second and per processor second."""
            data = [[datum(random, length) for _ in range(given.steps)] for _ in clients]
            began, busy = time.perf_counter(), processor_seconds(pid)
            run = map if way == "alone" else pool.map
            list(run(trained, clients, data))
            tokens = given.clients * given.steps * length
            took = time.perf_counter() - began, processor_seconds(pid) - busy
            return tokens / took[0], tokens / took[1]

        for length in given.lengths:
            found = {"alone": list[tuple[float, float]](), "at once": list[tuple[float, float]]()}
            for turn in range(given.turns + 1):
                for way in found:
                    measured = rates(way, length)
                    if turn:  # the first one warms up
                        found[way].append(measured)
            print(f"{given.clients} clients, {length} tokens, {given.dtype}:")
            for number, unit in enumerate(("second", "processor second")):
                alone, at_once = ([each[number] for each in turns] for turns in found.values())
                ratios = [b / a for a, b in zip(alone, at_once, strict=True)]
                print(
                    f"    tokens per {unit}: one after another {statistics.median(alone):.0f}, at "
                    f"once {statistics.median(at_once):.0f}, {statistics.median(ratios):.2f} times "
                    f"({min(ratios):.2f} to {max(ratios):.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
