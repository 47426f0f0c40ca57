"""What a torch backend says of its hardware: the whole difference between one and the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device as the engine needs to know it.

    Args:
        device: torch's name of it, such as `cpu`.
    """

    device: str
