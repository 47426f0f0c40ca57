"""What a torch backend says of its hardware: the whole difference between one and the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

ComputeDType: TypeAlias = Literal["bf16", "fp16", "fp32", "fp64"]
"""The seam's dtypes, and float64, which never crosses it."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device as the engine needs to know it.

    Args:
        device: torch's name of it, such as `cpu`.
        compute_dtype: what training and resident loads compute in, whatever the plan says; None
            for the plan's own dtype. With `fp64` everything from the weights to the gradients and
            the optimizer's arithmetic is float64 (wide.py), and the state is rounded to float32 at
            the end of each step, because that is what the seam carries: no more is lost by a
            checkpoint than by going on. Logits leave as float32. Streamed loads and merges are
            float32 under every profile.
    """

    device: str
    compute_dtype: ComputeDType | None = None
