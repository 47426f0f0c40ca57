"""Decoding with an adapter against decoding with the base, and many rows against one: ratios of
tokens per second.

    python benchmarks/decoding.py [cpu|mlx] [fp32|bf16|…] [QUANT] [MODEL]

SmolLM2-135M, or MODEL, with a rank 16 adapter on every linear layer, greedy. Base, adapter and
a batch of rows with the adapter take a step in turn, in one process, and the median step of each
counts: other work on the machine slows all of them.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from vox_core import models
from vox_core.contract import LoadJob, Model
from vox_core.host.load import Context
from vox_core.run.generate import Generator, Prompt, Token
from vox_core.run.sampling import Sampling
from vox_testing import jobs

PROMPT, ROWS = 32, 8
STEPS, WARM_UP = 96, 4
MODEL = "smollm2-135m"


def main(
    backend: str = "cpu", dtype: Any = "bf16", quant: Any = "none", model: str = MODEL
) -> None:
    folder = models.resolve(model).path
    adapter = jobs.stirred(jobs.start(folder, jobs.plan(folder, rank=16)), 0.01).adapter
    loaded = _load(backend, LoadJob(folder, dtype, quant))
    loaded.add_adapter("adapter", adapter)
    generator = Generator(loaded, ROWS)
    rows = [_rows(generator, *each) for each in ((1, None), (1, "adapter"), (ROWS, "adapter"))]
    seconds = [
        [_step(row, count) for row, count in zip(rows, (1, 1, ROWS), strict=True)]
        for _ in range(STEPS)
    ][WARM_UP:]
    base, adapted, batch = (statistics.median(each) for each in zip(*seconds, strict=True))
    sys.stdout.write(
        f"{backend} {dtype} {quant}: base {1 / base:.1f}, with the adapter {1 / adapted:.1f} "
        f"tokens/s, ratio {base / adapted:.2f}; {ROWS} rows {ROWS / batch:.1f} tokens/s, ratio "
        f"{ROWS * adapted / batch:.2f}\n"
    )


def _rows(generator: Generator, count: int, adapter: str | None) -> Iterator[Token]:
    """Rows of one length, with other tokens each."""
    sampling = Sampling(max_tokens=STEPS)
    starts = range(5, 5 + count)
    return generator.generate(
        Prompt(range(start, start + PROMPT), sampling, adapter=adapter) for start in starts
    )


def _load(backend: str, job: LoadJob) -> Model:
    module = importlib.import_module(f"vox_{backend}")
    loaded: Model = module.backend.vox_load(job, Context())
    return loaded


def _step(tokens: Iterator[Token], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        next(tokens)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(*sys.argv[1:])
