"""What a torch backend says of its hardware: the whole difference between one and the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device as the engine needs to know it.

    Args:
        device: torch's name of it, such as `cpu`.
        prepare: called once before the first tensor is made (threads, allocator).
    """

    device: str
    prepare: Callable[[], None] = lambda: None
