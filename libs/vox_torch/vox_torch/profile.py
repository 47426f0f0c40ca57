"""The device profile, which holds all differences between torch backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Properties of a device that the engine needs.

    Args:
        device: torch's name, such as `cpu`.
        prepare: changes each base model in place, once it is loaded and before the adapter is
            added. Adapter, gradients and the optimizer's arithmetic follow the dtype of the base;
            the state of a step and logits leave as float32. Streamed loads and merges are float32
            under every profile.
    """

    device: str
    prepare: Callable[[nn.Module], None] | None = None
