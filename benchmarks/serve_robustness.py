"""Robustness of `vox serve` on a tiny model: memory, slots and refusals under clients that go away.

    python benchmarks/serve_robustness.py [CONNECTS]

10,000 requests by 12 clients, of which every other one closes its connection in the middle of the
stream; then the worker's resident memory is compared with that after the first tenth, no answer may
be running or waiting, a full queue must answer 429 in under 50 ms, 50 requests go over one
connection, `kill -9` of the worker must end a stream within a second and the server must answer
again, and SIGTERM must let a running stream finish. It exits with 1 if one of these does not hold.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx

from vox_testing.tiny import make_model

CLIENTS, ROWS, QUEUE, LONG = 12, 8, 8, 400
MEMORY, SECONDS_OF_429, SECONDS_OF_KILL = 0.02, 0.05, 1.0
"""Allowed: growth of memory, seconds until a 429, seconds until clients see a killed worker."""
FEW_KERNELS = os.environ | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""oneDNN keeps code for 512 shapes; for 32, that is there from the start, and growth is a leak."""
END = {"logit_bias": {"257": -100, "258": -100, "259": -100}}  # its turn does not end early
BODY = {"model": "base", "prompt": "One two three", "temperature": 0, "stream": True, **END}


def main(connects: str = "10000") -> None:
    with tempfile.TemporaryDirectory() as scratch:
        base = make_model("llama", Path(scratch) / "base")
        command = [str(Path(sys.executable).with_name("vox")), "serve", str(base), "--port", "0",
                   "--backend", "cpu", "--dtype", "fp32", "--max-batch", str(ROWS),
                   "--queue", str(QUEUE)]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=FEW_KERNELS)
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1].removesuffix("/v1")
        try:
            failed = [what for what, holds in _checks(url, process, int(connects)) if not holds]
        finally:
            process.kill()
    sys.exit(f"does not hold: {', '.join(failed)}" if failed else 0)


def _checks(url: str, process: subprocess.Popen[str], connects: int) -> Iterator[tuple[str, bool]]:
    yield "memory", _connects(url, _worker(process.pid), connects)
    yield "429 in time", _full_queue(url)
    with httpx.Client(base_url=url, timeout=600) as client:
        for _ in range(50):
            client.post("/v1/completions", json={**BODY, "max_tokens": 1}).raise_for_status()
    print("50 requests over one connection", flush=True)
    yield "kill -9", _killed(url, process.pid)
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**BODY, "max_tokens": 64}, timeout=600
    ) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
    print(f"SIGTERM: the stream's end {last!r}, exit code {(code := process.wait(60))}", flush=True)
    yield "SIGTERM", (last, code) == ("data: [DONE]", 0)


def _connects(url: str, worker: int, connects: int) -> bool:
    with ThreadPoolExecutor(CLIENTS) as pool:
        first = max(connects // 10, CLIENTS)
        refused = sum(pool.map(lambda n: _one(url, n), range(first)))
        before = _memory(worker)
        refused += sum(pool.map(lambda n: _one(url, n), range(first, connects)))
    _until_idle(url)
    after = _memory(worker)
    print(
        f"{connects} connects, half aborted, {refused} refused with 429; no slot lost; "
        f"memory {before / 2**20:.1f} -> {after / 2**20:.1f} MiB ({after / before - 1:+.1%})",
        flush=True,
    )
    return after / before - 1 <= MEMORY


def _killed(url: str, supervisor: int) -> bool:
    """Kill the worker during a stream; the next request waits for the next worker."""
    body, killed = {**BODY, "max_tokens": LONG}, 0.0
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
            lines = response.iter_lines()
            next(lines)
            killed = time.perf_counter()
            os.kill(_worker(supervisor), signal.SIGKILL)
            list(lines)
            seconds = float("inf")
    except httpx.HTTPError:
        seconds = time.perf_counter() - killed
    again = httpx.post(f"{url}/v1/completions", json={**body, "stream": False}, timeout=600)
    print(
        f"kill -9: the stream ended after {seconds:.3f} s; an answer with status "
        f"{again.status_code} after {time.perf_counter() - killed:.1f} s",
        flush=True,
    )
    return seconds <= SECONDS_OF_KILL and again.status_code == 200


def _worker(supervisor: int) -> int:
    """The process that has the model."""
    (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return int(child)


def _one(url: str, number: int) -> int:
    """Read a whole stream, or half of one; return whether it was refused."""
    body = {**BODY, "prompt": f"One two {number % 50}", "max_tokens": 4}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
        if response.status_code in (429, 503):
            time.sleep(0.01)
            return 1
        response.raise_for_status()
        for _ in response.iter_lines():
            if number % 2:
                break
    return 0


def _until_idle(url: str) -> None:
    """Wait until no answer is running or waiting; a lost slot never becomes idle."""
    for _ in range(600):
        if (inside := _inside(url)) == (0, 0):
            return
        time.sleep(0.1)
    raise SystemExit(f"a slot was lost: {inside} answers run and wait")


def _inside(url: str) -> tuple[int, int]:
    """Answers that run and that wait."""
    found = httpx.get(f"{url}/metrics").text.splitlines()
    gauges = {line.split()[0]: line.split()[-1] for line in found if line[0] != "#"}
    return int(gauges["vox_answers_running"]), int(gauges["vox_answers_waiting"])


def _full_queue(url: str) -> bool:
    """The queue is filled by streams that go on; the refusals are timed."""
    body = {**BODY, "max_tokens": LONG}
    with ThreadPoolExecutor(64) as pool, httpx.Client(base_url=url, timeout=600) as client:
        asked = [pool.submit(_whole, url, body) for _ in range(ROWS + QUEUE)]
        seconds: list[float] = []
        while sum(_inside(url)) < ROWS + QUEUE and not all(each.done() for each in asked):
            pass
        while len(seconds) < 20 and not all(each.done() for each in asked):
            started = time.perf_counter()
            found = client.post("/v1/completions", json={**BODY, "max_tokens": 1})
            if found.status_code == 429:
                seconds.append(time.perf_counter() - started)
        if not seconds:
            raise SystemExit("the queue was never full")
        for each in asked:
            each.result()
        middle, slowest = sorted(seconds)[len(seconds) // 2] * 1e3, max(seconds) * 1e3
        print(
            f"429 after {middle:.0f} ms (median of {len(seconds)}), {slowest:.0f} at most",
            flush=True,
        )
    return slowest < SECONDS_OF_429 * 1e3


def _whole(url: str, body: dict[str, object]) -> None:
    found = httpx.post(f"{url}/v1/completions", json=body, timeout=900)
    assert found.status_code == 429 or found.text.count("data: ") > LONG // 4, found.text[:300]


def _memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main(*sys.argv[1:])
