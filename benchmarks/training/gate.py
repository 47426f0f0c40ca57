"""Same losses and as much learnt, or no result.

A trainer that pads differently, averages means or lets documents see one another does other work,
and its speed says nothing. Each loss of each step is held against that of transformers and PEFT in
float32 (trainers/plain_loop.py) on the same device, over the same documents, each by itself; vox is
judged by it like everybody else. In a few steps losses hardly tell whether the adapter was trained
at all, so its size is held as well: Adam's first steps are the learning rate, whatever the
gradient, so a wrong rate or a lost step shows in the norm of B. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# float32: right implementations differ by 1e-6 at most over 20 steps on a CPU, and GPUs add in
# orders of their own; documents that see one another were 9e-3 off, for the tiny model.
# bfloat16: it rounds to 2^-9 = 0.2 %, and SmolLM2 was 0.3 % off after three steps; wrong
# normalisation moves a loss by 2 % or more.
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}

# Of the norm of B. Adapters that are rounded to bfloat16 at each step lose small updates.
MOVED = {"fp32": 0.02, "bf16": 0.1}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Largest distance of the losses from the reference, its step, and whether it passes.

    `worst` is relative; infinite if a loss is missing or not a number.
    """

    passed: bool
    worst: float
    step: int
    found: float
    expected: float

    def told(self) -> str:
        """Format the verdict for a void row."""
        return f"loss {self.found:.5f} at step {self.step}, expected {self.expected:.5f}"


def judge(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> Verdict:
    """Hold losses against the reference, step by step."""
    if len(losses) != len(reference):
        return Verdict(False, math.inf, len(losses) + 1, math.nan, reference[-1])
    apart = [_apart(a, b) for a, b in zip(losses, reference, strict=True)]
    worst = max(range(len(apart)), key=apart.__getitem__)
    passed = apart[worst] <= tolerance
    return Verdict(passed, apart[worst], worst + 1, losses[worst], reference[worst])


def _apart(found: float, expected: float) -> float:
    # A reference that is no number lets nobody pass; NaN would be lost in a maximum.
    known = math.isfinite(found) and math.isfinite(expected)
    return abs(found / expected - 1) if known else math.inf
