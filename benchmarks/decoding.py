"""Decoding with an adapter against decoding with the base: ratio of tokens per second.

    python benchmarks/decoding.py [cpu|mlx] [fp32|bf16|…] [QUANT] [MODEL]

SmolLM2-135M, or MODEL, with a rank 16 adapter on every linear layer, greedy. Base and adapter
take a token in turn, in one process, and the median step of each counts:
other work on the machine slows both.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vox_core import models
from vox_core.contract import LoadJob, Sampling
from vox_testing import jobs

PROMPT_T = np.arange(5, 37)
STEPS, WARM_UP = 96, 4
MODEL = "smollm2-135m"


def main(
    backend: str = "cpu", dtype: Any = "bf16", quant: Any = "none", model: str = MODEL
) -> None:
    folder = models.resolve(model).path
    adapter = jobs.stirred(jobs.start(folder, jobs.plan(folder, rank=16)), 0.01).adapter
    load = _loader(backend)
    loaded = [load(LoadJob(folder, dtype, each, quant)) for each in (None, adapter)]
    rows = [each.generate(PROMPT_T, Sampling(max_tokens=STEPS)) for each in loaded]
    seconds = [[_step(row) for row in rows] for _ in range(STEPS)][WARM_UP:]
    base, adapted = (statistics.median(each) for each in zip(*seconds, strict=True))
    sys.stdout.write(
        f"{backend} {dtype} {quant}: base {1 / base:.1f}, with the adapter {1 / adapted:.1f} "
        f"tokens/s, ratio {base / adapted:.2f}\n"
    )


def _loader(backend: str) -> Any:
    if backend == "cpu":
        from vox_torch.load import load

        return lambda job: load(job, "cpu")
    from vox_core.run.context import Context
    from vox_mlx import backend as mlx

    return lambda job: mlx.vox_load(job, Context(0, Path()))


def _step(row: Iterator[int]) -> float:
    started = time.perf_counter()
    next(row)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(*sys.argv[1:])
