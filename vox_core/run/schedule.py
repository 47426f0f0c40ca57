"""The learning rate of a step: linear warm-up, then cosine, linear or constant."""

from __future__ import annotations

import math

from vox_core.contract import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int) -> float:
    """The rate of step `step`, counted from 1.

    Warm-up takes `round(warmup * total_steps)` steps and is never zero: step 1 of 10 warm-up steps
    has a tenth of the rate. Cosine and linear reach zero after the last step, not at it, so that
    every step trains. (These are transformers' `get_scheduler` curves, started one step later.)
    """
    warmup = round(spec.warmup * total_steps)
    if step <= warmup:
        return spec.lr * step / (warmup + 1)
    return spec.lr * _shape(spec.schedule, (step - 1 - warmup) / max(1, total_steps - warmup))


def _shape(schedule: str, done: float) -> float:
    if schedule == "constant":
        return 1.0
    return 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
