"""Processes in MLX's ring: the sum of their gradients, and a run of several."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

RANK = """
import json, sys
import mlx.core as mx
import numpy as np
from vox_core.contract import World
from vox_mlx.ring import Ring

rank, size = map(int, sys.argv[1:])
ring = Ring(World(rank, size))
mine = np.zeros(size)
mine[rank] = 0.1 * (rank + 1)
made = np.random.default_rng(rank).normal(size=(2, 5)).astype(np.float32) * 10.0**rank
own = [{"a": mx.array(row[:3]), "b": mx.array(row[3:].reshape(2, 1))} for row in made]
like = {"a": mx.zeros(3), "b": mx.zeros((2, 1))}
first = {name: own[1][name] + own[0][name] for name in like} if rank == 0 else {}
total = ring.gather_sum(first, own if rank else [], like)
flat = [*total["a"].tolist(), *total["b"].reshape(-1).tolist()]
print(json.dumps([ring.share(mine).tolist(), flat]))
"""


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_add_in_order(size, tmp_path):
    """As one process would: not in pairs, and not in another order."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    environ = {**os.environ, "MLX_HOSTFILE": str(hosts), "RENDEZVOUS_FILE": str(tmp_path / "met")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size)],
            env={**environ, "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [json.loads(process.stdout.readline()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    made = [
        np.random.default_rng(r).normal(size=(2, 5)).astype(np.float32) * 10.0**r
        for r in range(size)
    ]
    total_N = np.zeros(5, np.float32)
    for row_N in np.concatenate(made).astype(np.float32):
        total_N = row_N + total_N
    assert [each[0] for each in said] == [[0.1 * (r + 1) for r in range(size)]] * size
    assert [each[1] for each in said] == [total_N.tolist()] * size


@pytest.mark.long
def test_two_processes_train_what_one_trains(tmp_path):
    """Bit for bit, with dropout; resumed by one process as well."""
    from vox_testing.tiny import make_model

    model, data = make_model("llama", tmp_path / "model"), tmp_path / "train.jsonl"
    lines = [{"prompt": "word " * (1 + n % 5), "completion": f"answer {n} "} for n in range(24)]
    data.write_text("\n".join(map(json.dumps, lines)))
    settings = ["--model", model, "--data", data, "--backend", "mlx", "--dtype", "fp32",
                "--allow-cpu", "--tune", "ignore", "--batch-size", 6, "--dropout", 0.2,
                "--micro-batch-tokens", 64, "--schedule", "constant"]  # fmt: skip
    two = ["--launcher", "mlx", "--processes", 2]
    vox(*settings, "--max-steps", 4, "--out", tmp_path / "one")
    vox(*settings, "--max-steps", 2, "--out", tmp_path / "two", *two)
    more = ["--max-steps", 3, "--allow-change", "max-steps"]
    vox("--resume", tmp_path / "two", *more)
    vox("--resume", tmp_path / "two", "--max-steps", 4, *more[2:], *two)
    found = [(tmp_path / run / "adapter_model.safetensors").read_bytes() for run in ("one", "two")]
    assert found[0] == found[1]


def vox(*arguments: object) -> None:
    command = [sys.executable, "-m", "vox_core.cli", "train", *map(str, arguments)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
