"""Which settings fit into so much memory: a grid of predictions, and the one to begin with.

The grid goes over what changes memory and leaves the adapter as it is: the quantisation of the
base, gradient checkpointing, tokens computed at once. What is suggested changes the numbers last:
first no quantisation, then no recomputing, then as many tokens at once as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from vox_core.contract import Quant
from vox_core.data.largest import Largest
from vox_core.host.manifest import MemoryProfile
from vox_core.memory.architecture import Architecture
from vox_core.memory.predict import Demand, predict
from vox_core.memory.storage import weight_bytes

MICRO_BATCH_TOKENS = (512, 1024, 2048, 4096, 8192)
SPARE = 0.1
"""Share of the memory that settings which fit leave free: other programs take some, and real runs
differ from what is predicted by up to 15 % (benchmarks/memory.py)."""


@dataclass(frozen=True, slots=True)
class Option:
    """Settings, and the peak that is predicted for them."""

    quant: Quant
    gradient_checkpointing: bool
    micro_batch_tokens: int
    peak: int

    def flags(self, asked: Quant) -> str:
        """As they would be typed by somebody whose `--quant` is `asked`."""
        quant = f"--quant {self.quant} " if self.quant != asked else ""
        recompute = "--gradient-checkpointing " if self.gradient_checkpointing else ""
        return f"{quant}{recompute}--micro-batch-tokens {self.micro_batch_tokens}"


def options(
    model: Architecture,
    demand: Demand,
    profile: MemoryProfile,
    quants: Collection[Quant],
    largest_of: Callable[[int], Largest],
) -> list[Option]:
    """The grid, from what changes the numbers least to what saves most.

    Args:
        demand: all else that is asked for.
        quants: quantisations that the backend has and the model can have.
        largest_of: `micro_batch_tokens` -> the largest micro-batch.
    """
    by_size = sorted(quants, key=lambda quant: -weight_bytes(model, quant, demand.dtype))
    made = []
    for quant in by_size:
        for recompute in (False, True):
            for budget in MICRO_BATCH_TOKENS:
                largest = largest_of(budget)
                asked = replace(
                    demand, quant=quant, gradient_checkpointing=recompute, largest=largest
                )
                peak = predict(model, asked, profile).peak
                made.append(Option(quant, recompute, budget, peak))
    return made


def fitting(grid: Iterable[Option], memory: int) -> list[Option]:
    """Those that leave a tenth of `memory` free."""
    return [option for option in grid if option.peak <= (1 - SPARE) * memory]


def suggest(
    grid: Sequence[Option], memory: int, quant: Quant = "none", tokens: int = 0
) -> Option | None:
    """The one to begin with in so many bytes; None if nothing fits.

    Args:
        quant: what was asked for, and is kept where it fits; `none` for no wish.
        tokens: `micro_batch_tokens` as they are, which stay where others are no gain.
    """
    fits = fitting(grid, memory)
    if not fits:
        return None
    first = next((option for option in fits if quant in ("none", option.quant)), fits[0])
    alike = [
        option
        for option in fits
        if (option.quant, option.gradient_checkpointing)
        == (first.quant, first.gradient_checkpointing)
    ]
    # Beyond the largest step of the data, more tokens at once change nothing.
    return max(
        alike,
        key=lambda option: (
            option.peak,
            option.micro_batch_tokens == tokens,
            -option.micro_batch_tokens,
        ),
    )
