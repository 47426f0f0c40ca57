"""SIGKILL of `vox tinker serve` at random moments of a loop like the cookbook's `rl_loop`.

    python benchmarks/tinker_killed.py [--times 30] [--repeat-seconds 1]

A tiny model, in float32. The loop's clients are the real SDK's, and go on by its retries alone. In
the end, each loss and the final weights must be those of an undisturbed loop.

Unlike `rl_loop`, it takes the log-probabilities of samples from `forward`: those of a sampler
depend in their last bits on the rows that were generated beside it, killed or not.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from vox_core.api.serving import listening
from vox_core.api.training import load_newest
from vox_testing.tiny import make_model
from vox_tinker.checkpoints import STATE, Store

ADAM = types.AdamParams(learning_rate=1e-2)
SERVER = """
import os, sys
import torch, transformers
from vox_tinker import server, training
from vox_core.cli import main
training.REPEAT_SECONDS = float(sys.argv.pop(1))
for _ in sys.stdin:
    if (pid := os.fork()) == 0:
        main()
    print("PID", pid, flush=True)
    os.waitpid(pid, 0)
"""
"""Starts a server for each line of its input; a fork has everything imported."""


class Server:
    """A server in a process, which can be killed and started again at its address."""

    def __init__(self, base: Path, runs: Path, seconds: float) -> None:
        with listening("127.0.0.1", 0) as free:
            port = str(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable, "-c", SERVER, str(seconds), "tinker", "serve", "--model",
            f"tiny={base}", "--backend", "cpu", "--dtype", "fp32", "--port", port, "--out",
            str(runs),
        ]  # fmt: skip
        self._forks = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.start()

    def start(self) -> None:
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write("start\n")
        found = ""
        while "TINKER_BASE_URL" not in found:
            found = self._forks.stdout.readline()
            assert found, "the server did not start"
            if found.startswith("PID"):
                self._pid = int(found.split()[1])

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._forks.communicate()


def rewarded(prompt: list[int], found: types.SampleResponse) -> list[types.Datum]:
    """Make data of samples: the reward is the share of even tokens, less the group's mean."""
    rewards = [float(np.mean([t % 2 == 0 for t in each.tokens])) for each in found.sequences]
    data = []
    for each, reward in zip(found.sequences, rewards, strict=True):
        tokens, before = [*prompt, *each.tokens], len(prompt) - 1
        count = len(each.tokens)
        given = {
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * (before + count),
            "advantages": [0.0] * before + [reward - float(np.mean(rewards))] * count,
        }
        data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), given))
    return data


def loop(url: str, goes_on: Callable[[int], bool]) -> tuple[list[float], str]:
    """Learn while `goes_on(step)`; return the losses, and the path of the final weights."""
    service = tinker.ServiceClient(base_url=url)
    client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    losses, step = [], 0
    while goes_on(step):
        sampler = client.save_weights_and_get_sampling_client().result()
        prompts = [[10 + n, 20, 30 + step % 50] for n in range(4)]
        waiting = [
            sampler.sample(
                types.ModelInput.from_ints(prompt), 4,
                types.SamplingParams(max_tokens=16, seed=100 * step + number, stop=[]),
            )
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip
        made = [rewarded(p, found.result()) for p, found in zip(prompts, waiting, strict=True)]
        scored = [client.forward(data, "importance_sampling") for data in made]
        for data, scores in zip(made, scored, strict=True):
            for each, score in zip(data, scores.result().loss_fn_outputs, strict=True):
                each.loss_fn_inputs["logprobs"] = score["logprobs"]
        passes = [client.forward_backward(data, "importance_sampling") for data in made]
        stepped = client.optim_step(ADAM)
        losses += [each.result().metrics["loss:sum"] for each in passes]
        losses.append(float((stepped.result().metrics or {})["grad_norm"]))
        if step % 10 == 9:
            client.save_state(f"step-{step}").result()
        step += 1
    path = client.save_state("final").result().path
    service.close("success").result()
    return losses, path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--repeat-seconds", type=float, default=1.0)
    given = parser.parse_args()
    os.environ |= {"TINKER_API_KEY": "tml-killed", "TINKER_TELEMETRY": "0"}
    logging.getLogger("tinker").setLevel(logging.ERROR)
    rng, moments = random.Random(0), list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        base = make_model("llama", root / "base")
        server = Server(base, root / "killed", given.repeat_seconds)
        steps = [0]

        def kill() -> None:
            while len(moments) < given.times:
                time.sleep(moment := rng.uniform(0.05, 3))
                server.kill()
                moments.append(round(moment, 2))
                print(f"kill {len(moments)} in step {steps[0]}", flush=True)
                server.start()

        def goes_on(step: int) -> bool:
            steps[0] = step
            return len(moments) < given.times or step < 20

        killer = threading.Thread(target=kill)
        killer.start()
        found, path = loop(server.url, goes_on)
        killer.join()
        server.close()
        server = Server(base, root / "whole", 1e9)
        expected, other = loop(server.url, lambda step: step <= steps[0] - 1)
        server.close()
        states = [
            load_newest(Store(root / name).find(each)[2] / STATE)[0]
            for name, each in (("killed", path), ("whole", other))
        ]
        ours, whole = (dict(state.adapter.tensors()) for state in states)
        equal = all(np.array_equal(ours[name], whole[name]) for name in whole)
        moved = max(float(np.abs(value).max()) for value in whole.values())
        print(
            f"{given.times} kills in {steps[0]} steps; {len(found)} acknowledged numbers, "
            f"{'equal' if found == expected else 'DIFFERENT'}; final weights "
            f"{'equal bit for bit' if equal else 'DIFFERENT'} (largest {moved:.3f}), step "
            f"{states[0].step} of {states[1].step}"
        )
        sys.exit(found != expected or not equal)


if __name__ == "__main__":
    main()
