"""What a torch backend says of its hardware: the whole difference between one and the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device as the engine needs to know it.

    Args:
        device: torch's name of it, such as `cpu`.
        prepare: changes each base model in place, once it is loaded and before the adapter is
            added. Adapter, gradients and the optimizer's arithmetic follow the dtype of the base;
            the state of a step and logits leave as float32. Streamed loads and merges are float32
            under every profile.
    """

    device: str
    prepare: Callable[[nn.Module], None] | None = None
