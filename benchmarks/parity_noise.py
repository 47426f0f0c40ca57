"""Measure each backend's float32 error against float64: the origin of tests/parity/tolerances.py.

    python benchmarks/parity_noise.py

Tiny models of every family, every method, twenty steps of two micro-batches, as in the tests. The
float64 run is vox_torch's own engine, widened (vox_testing/float64.py). Prints the largest distance
of each kind over all families and methods, for each backend.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.parity import held
from vox_testing import jobs
from vox_testing.float64 import compute_in_float64
from vox_testing.tiny import FAMILIES
from vox_torch.engine import Engine
from vox_torch.profile import DeviceProfile

if TYPE_CHECKING:
    import numpy as np


class Wide:
    """The torch engine in float64, as a backend."""

    def __init__(self) -> None:
        self._engine = Engine(DeviceProfile("cpu", compute_in_float64))

    def vox_train(self, job, context):
        return self._engine.train(job, context)

    def vox_load(self, job, context):
        return self._engine.load(job)


def noise(folder: Path, method: str, backend: str) -> dict[str, float]:
    """The distances of one backend, for one model and method."""
    mine, exact = (held.train(each, folder, method=method) for each in (backend, "wide"))
    moments = [{n: m[0] for n, m in t.state.moments.items()} for t in (mine, exact)]
    state = held.adapter(folder, method)
    return {
        "logits": held.apart(
            held.logits(backend, folder, state), held.logits("wide", folder, state)
        ),
        "loss": largest(mine.losses, exact.losses),
        "gradient norm": largest(mine.norms, exact.norms),
        "gradient, step 1": held.distance(
            first_gradients(backend, folder, method), first_gradients("wide", folder, method)
        ),
        "first moments": held.distance(*moments),
        "adapter": held.distance(mine.state.adapter.tensors(), exact.state.adapter.tensors()),
    }


def first_gradients(backend: str, folder: Path, method: str) -> dict[str, np.ndarray]:
    plan = {"method": method, "clip": 0.0}
    start = jobs.stirred(jobs.start(folder, jobs.plan(folder, **plan)))
    state = held.go_on(backend, folder, start, jobs.curve(1, groups=2), **plan).state
    return {name: first / 0.1 for name, (first, _) in state.moments.items()}


def largest(mine: list[float], exact: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(mine, exact, strict=True))


def main() -> None:
    own, wide = held.hooks, Wide()
    held.hooks = lambda backend: wide if backend == "wide" else own(backend)
    worst: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as root:
        for family in FAMILIES:
            for method in ("lora", "rslora", "dora"):
                for backend in ("cpu", "mlx"):
                    found = noise(held.model(Path(root), family), method, backend)
                    for kind, value in found.items():
                        worst[kind, backend] = max(value, worst.get((kind, backend), 0.0))
    print(f"{'':18} {'cpu':>9} {'mlx':>9}")
    for kind in dict.fromkeys(kind for kind, _ in worst):
        print(f"{kind:18} {worst[kind, 'cpu']:9.1e} {worst[kind, 'mlx']:9.1e}")


if __name__ == "__main__":
    main()
