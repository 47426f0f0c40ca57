"""Whether `vox serve` answers as `vox generate` does: SmolLM2 with three adapters, in float32.

    python benchmarks/serve_equal.py [BACKEND]

32 greedy chats over three adapters through HTTP: alone, 8 at once, and 8 at once in another order.
Each text must be that of `vox generate` with the same adapter. It exits with 1 where one differs,
or where the adapters answer too much alike for a mistaken one to show.
MLX on Linux needs VOX_MLX_BLAS to end within minutes (see the Makefile).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx

from vox_core import models
from vox_core.adapter.peft import write_adapter
from vox_testing import jobs

VOX = str(Path(sys.executable).with_name("vox"))
CHATS, TOKENS, NAMES = 32, 24, ("a", "b", "c")
SIZE = 0.1
"""Standard deviation of B: 29 of the 32 prompts get three different texts; of 0.02, four do."""
TOPICS = ("the sea", "a red door", "prime numbers", "bread", "winter", "a lost dog", "Köln")


def main(backend: str = "cpu") -> None:
    flags = ["--backend", backend, "--dtype", "fp32"]
    chats = [
        (NAMES[n % 3], f"Tell me {n % 5 + 1} things about {TOPICS[n % 7]} and {n * n}.")
        for n in range(CHATS)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        runs = _adapters(Path(scratch))
        expected = _generated(runs, chats, flags)
        differ = _served(runs, chats, expected, flags)
    sys.exit(f"{differ} answers differ" if differ else 0)


def _adapters(scratch: Path) -> list[Path]:
    base = models.resolve("smollm2-135m").path
    state = jobs.start(base, jobs.plan(base, rank=16))
    runs = [scratch / name for name in NAMES]
    for seed, run in enumerate(runs):
        run.mkdir()
        adapter = jobs.stirred(state, SIZE, seed).adapter
        write_adapter(run, adapter, base=str(base), modules={})
    return runs


def _generated(
    runs: Sequence[Path], chats: Sequence[tuple[str, str]], flags: Sequence[str]
) -> dict[tuple[str, str], str]:
    """Answer every prompt by every adapter with `vox generate`, in a process for each adapter."""
    found, prompts = {}, [text for _, text in chats]
    for run in runs:
        file = run.parent / f"{run.name}.jsonl"
        file.write_text("\n".join(json.dumps({"prompt": each}) for each in prompts))
        command = [VOX, "generate", str(run), "--file", str(file), "--max-tokens", str(TOKENS)]
        done = subprocess.run([*command, *flags], stdout=subprocess.PIPE, text=True, check=True)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        for prompt, answer in zip(prompts, answers, strict=True):
            found[run.name, prompt] = answer["answer"]
    telling = sum(len({found[name, prompt] for name in NAMES}) == len(NAMES) for prompt in prompts)
    print(f"vox generate: {telling} of {CHATS} prompts get three different texts", flush=True)
    if telling < CHATS * 3 // 4:
        raise SystemExit("the adapters answer too much alike")
    return found


def _served(
    runs: Sequence[Path],
    chats: Sequence[tuple[str, str]],
    expected: dict[tuple[str, str], str],
    flags: Sequence[str],
) -> int:
    command = [VOX, "serve", *map(str, runs), *flags, "--port", "0"]
    shuffled = random.Random(0).sample(chats, len(chats))
    differ = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[-1]
            for title, order, at_once in (
                ("alone", chats, 1),
                ("8 at once", chats, 8),
                ("8 at once, shuffled", shuffled, 8),
            ):
                started = time.perf_counter()
                with ThreadPoolExecutor(at_once) as pool:
                    found = list(pool.map(lambda chat: _ask(url, *chat), order))
                same = sum(text == expected[chat] for text, chat in zip(found, order, strict=True))
                seconds = time.perf_counter() - started
                print(f"{title}: {same} of {len(order)} equal, {seconds:.0f} s", flush=True)
                differ += len(order) - same
        finally:
            process.terminate()
    return differ


def _ask(url: str, model: str, text: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": TOKENS,
    }
    found = httpx.post(f"{url}/chat/completions", json=body, timeout=600)
    found.raise_for_status()
    return str(found.json()["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main(*sys.argv[1:])
