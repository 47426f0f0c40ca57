"""Cells of the benchmark: one for each model, dtype and kind of data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from benchmarks.training.documents import Data
from vox_core.contract import DType, Quant


@dataclass(frozen=True, slots=True)
class Cell:
    """Model, dtype, data and trainers of one table of results.

    Args:
        steps: optimizer steps of a run; the first is not counted.
        per_step: documents of a step.
        row_tokens: tokens computed at once, for those trainers that may choose.
    """

    model: str
    dtype: DType
    data: Data
    trainers: tuple[str, ...]
    rounds: int
    steps: int
    per_step: int = 8
    row_tokens: int = 2048
    quant: Quant = "none"
    method: Literal["lora", "full"] = "lora"

    @property
    def id(self) -> str:
        kind = self.dtype if self.quant == "none" else self.quant
        return f"{self.model}/{kind}/{self.data}" + ("/full" if self.method == "full" else "")


SORTED = "loop-sorted"
"""Trains on the cell's documents in other steps: all are sorted by length first."""

TORCH = ("vox", "loop", SORTED, "trl", "trl-best")
MLX = ("vox-mlx", "mlx-lm")


def cpu(*, quick: bool) -> list[Cell]:
    """Cells for the processor. Quick ones end in a quarter of an hour on two cores."""
    rounds, steps = (1, 3) if quick else (3, 6)
    tiny = Cell("tiny", "fp32", "chat", TORCH, rounds, 30)
    if quick:
        model = "smollm2-135m-real"
        chat = Cell(model, "bf16", "chat", TORCH, rounds, steps)
        # TRL's defaults take as long as all others together.
        mixed = Cell(model, "bf16", "mixed", (*TORCH[:3], "trl-best"), 1, steps, per_step=4)
        full = Cell(model, "bf16", "chat", TORCH[:3], 1, steps, method="full")
        return [tiny, chat, mixed, full]
    return [tiny, *_cpu_models(rounds, steps)]


def _cpu_models(rounds: int, steps: int) -> Iterable[Cell]:
    real = "smollm2-135m-real"
    for data in ("chat", "mixed", "rows-128", "rows-1024"):
        # MLX multiplies bfloat16 in a scalar loop on Linux, so it is measured in float32.
        yield Cell(real, "fp32", data, TORCH + _mlx(), rounds, steps)
        yield Cell(real, "bf16", data, TORCH, rounds, steps)
    for data in ("chat", "mixed"):
        yield Cell(real, "bf16", data, TORCH[:3], rounds, steps, method="full")
    yield Cell(real, "bf16", "rows-4096", TORCH, rounds, steps, per_step=2)
    yield Cell("smollm2-360m", "bf16", "mixed", TORCH, rounds, steps)
    yield Cell("qwen2.5-0.5b", "bf16", "mixed", TORCH, rounds, steps)
    # A step takes ten seconds and more.
    yield Cell("qwen2.5-1.5b", "bf16", "mixed", TORCH[:3], 1, 3, per_step=4)


def _mlx() -> tuple[str, ...]:
    return MLX if find_spec("mlx_lm") and find_spec("vox_mlx") else ()


def cuda(*, quick: bool) -> list[Cell]:
    """Cells for one NVIDIA GPU, ragged data in all of them.

    Quick ones have few processes, since each takes up to 20 s to start.
    """
    if quick:
        sizes = [("smollm2-135m", "none"), ("llama-3.1-8b", "none"), ("llama-3.1-8b", "nf4")]
        some = ("vox", "loop", "trl-best")
        return [Cell(m, "bf16", "mixed", some, 1, 4, 16, 8192, q) for m, q in sizes]
    return [
        Cell(model, "bf16", "mixed", TORCH, 3, 12, 32, 16384, quant)
        for model in ("smollm2-135m", "qwen3-0.6b", "llama-3.1-8b")
        for quant in ("none", "nf4")
    ]
