"""Generation in a running batch: tokens per second of 8 rows at once against one.

    python benchmarks/generation.py [cpu|cuda] [fp32|bf16|…] [ROWS] [MODEL]

SmolLM2-135M, or MODEL, greedy, with the base alone, with a rank 16 adapter on every linear layer,
and with the rows spread over the base and two adapters. All batches take a step in turn, in one
process, and the median step of each counts: other work on the machine slows all of them.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

from vox_core import models
from vox_core.contract import LoadJob
from vox_testing import jobs
from vox_torch.load import TorchModel, load
from vox_torch.profile import DeviceProfile

STEPS, WARM_UP = 48, 4
KINDS: dict[str, tuple[str | None, ...]] = {
    "base": (None,),
    "adapter": ("a",),
    "base and two adapters": (None, "a", "b"),
}


def main(
    device: str = "cpu", dtype: Any = "bf16", rows: str = "8", model: str = "smollm2-135m"
) -> None:
    folder = models.resolve(model).path
    loaded = load(LoadJob(folder, dtype), DeviceProfile(device))
    state = jobs.start(folder, jobs.plan(folder, rank=16))
    for name in "ab":
        loaded.add_adapter(name, jobs.stirred(state, 0.01).adapter)
    batches = [_Batch(loaded, i, size, names) for i, (size, names) in enumerate(_sizes(int(rows)))]
    seconds = [[batch.step() for batch in batches] for _ in range(STEPS)][WARM_UP:]
    medians = [statistics.median(each) for each in zip(*seconds, strict=True)]
    for kind, one, many in zip(KINDS, medians[::2], medians[1::2], strict=True):
        sys.stdout.write(
            f"{device} {dtype} {kind}: one row {1 / one:.1f}, {rows} rows {int(rows) / many:.1f} "
            f"tokens/s, ratio {int(rows) * one / many:.2f}\n"
        )


def _sizes(rows: int) -> list[tuple[int, tuple[str | None, ...]]]:
    return [(size, names) for names in KINDS.values() for size in (1, rows)]


class _Batch:
    """Some rows of the model's running batch, which take their steps alone."""

    def __init__(
        self, model: TorchModel, number: int, size: int, names: tuple[str | None, ...]
    ) -> None:
        self._model, self._tokens = model, dict[int, int]()
        for row in range(number * 1000, number * 1000 + size):
            model.insert(row, np.arange(5, 37 + row % 1000), names[row % 1000 % len(names)])
        while len(self._tokens) < size:
            self.step()

    def step(self) -> float:
        started = time.perf_counter()
        found = self._model.advance(self._tokens)
        self._tokens |= {row: int(logits_V.argmax()) for row, logits_V in found.items()}
        return time.perf_counter() - started


if __name__ == "__main__":
    main(*sys.argv[1:])
