"""Measure matrix-product throughput at a model's own shapes.

    python -m benchmarks.training.roof SHAPE DTYPE DEVICE ROWS

For each linear module of a layer and for the output head: the product of the forward pass and that
of the gradient of its input, `ROWS` tokens at once, the best of five. The roof is all their FLOP
over all their time, each shape as often as it occurs. Prints FLOP per second.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from benchmarks.training.shapes import SHAPES, Shape

BEST_OF = 5


def measure(shape: Shape, dtype: str, device: str, rows: int) -> float:
    """FLOP per second over the model's products."""
    count = Counter(shape.linears() * shape.layers)
    count[shape.vocabulary, shape.hidden] += 1
    flop = sum(n * 4 * rows * outputs * inputs for (outputs, inputs), n in count.items())
    return flop / sum(n * _seconds(size, dtype, device, rows) for size, n in count.items())


def _seconds(size: tuple[int, int], dtype: str, device: str, rows: int) -> float:
    """Time a forward product and the gradient of its input."""
    import torch

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    weight_OI = torch.randn(size, device=device, dtype=kind)
    input_TI = torch.randn(rows, size[1], device=device, dtype=kind)
    gradient_TO = torch.randn(rows, size[0], device=device, dtype=kind)
    times = []
    for _ in range(BEST_OF):
        _wait(device)
        start = time.perf_counter()
        torch.nn.functional.linear(input_TI, weight_OI)
        gradient_TO @ weight_OI
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    print(measure(SHAPES[sys.argv[1]], sys.argv[2], sys.argv[3], int(sys.argv[4])))
