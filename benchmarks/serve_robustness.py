"""Robustness of `vox serve` on SmolLM2: memory, slots and refusals under clients that go away.

    python benchmarks/serve_robustness.py [CONNECTS]

10,000 requests by 12 clients, of which every other one closes its connection in the middle of the
stream; then the resident memory is compared with that after the first tenth, no answer may be
running or waiting, a full queue must answer 429 in under 50 ms, 50 requests go over one connection,
and SIGTERM must let a running stream finish.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx

CLIENTS, QUEUE = 12, 8
BODY = {"model": "smollm2-135m", "prompt": "One two three", "temperature": 0, "stream": True}


def main(connects: str = "10000") -> None:
    command = [str(Path(sys.executable).with_name("vox")), "serve", "smollm2-135m", "--port", "0",
               "--backend", "cpu", "--queue", str(QUEUE)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1].removesuffix("/v1")
    try:
        _run(url, process, int(connects))
    finally:
        process.kill()


def _run(url: str, process: subprocess.Popen[str], connects: int) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        first = max(connects // 10, CLIENTS)
        refused = sum(pool.map(lambda n: _one(url, n), range(first)))
        before = _memory(process.pid)
        refused += sum(pool.map(lambda n: _one(url, n), range(first, connects)))
        _until_idle(url)
        after = _memory(process.pid)
    print(
        f"{connects} connects, half aborted, {refused} refused with 429; "
        f"memory {before / 2**20:.0f} -> {after / 2**20:.0f} MiB ({after / before - 1:+.1%})"
    )
    _full_queue(url)
    with httpx.Client(base_url=url, timeout=600) as client:
        for _ in range(50):
            client.post("/v1/completions", json={**BODY, "max_tokens": 1}).raise_for_status()
    print("50 requests over one connection")
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**BODY, "max_tokens": 64}, timeout=600
    ) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    print(f"SIGTERM: the stream finished, exit code {process.wait(60)}")


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
        found = httpx.get(f"{url}/metrics").text.splitlines()
        gauges = {line.split()[0]: line.split()[-1] for line in found if line[0] != "#"}
        if gauges["vox_answers_running"] == gauges["vox_answers_waiting"] == "0":
            return
        time.sleep(0.1)
    raise SystemExit(f"a slot was lost: {gauges}")


def _full_queue(url: str) -> None:
    """The queue is filled by streams that go on; the refusals are timed."""
    body = {**BODY, "max_tokens": 400}
    with ThreadPoolExecutor(64) as pool, httpx.Client(base_url=url, timeout=600) as client:
        asked = [pool.submit(_whole, url, body) for _ in range(8 + QUEUE)]
        seconds: list[float] = []
        while len(seconds) < 20 and not all(each.done() for each in asked):
            started = time.perf_counter()
            found = client.post("/v1/completions", json={**BODY, "max_tokens": 1})
            if found.status_code == 429:
                seconds.append(time.perf_counter() - started)
        middle, slowest = sorted(seconds)[len(seconds) // 2] * 1e3, max(seconds) * 1e3
        print(f"429 after {middle:.0f} ms (median of {len(seconds)}), {slowest:.0f} at most")


def _whole(url: str, body: dict[str, object]) -> None:
    httpx.post(f"{url}/v1/completions", json=body, timeout=900)


def _memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main(*sys.argv[1:])
