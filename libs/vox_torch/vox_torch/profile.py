"""The device profile, which holds all differences between torch backends, and the engine's knobs.

The knobs of the manifest's `[tuning]` change speed, not results; the default of each is its first
value:

    layout     end-to-end if the model allows it, or padded rows
    threads    default, torch's own number, or half of it: hyper-threads and slow cores can cost
               more than they bring
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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


def wants_rows(tuning: Mapping[str, str]) -> bool:
    """Whether the knob selects padded rows."""
    return tuning.get("layout") == "padded"


@contextmanager
def threads(tuning: Mapping[str, str]) -> Iterator[None]:
    """Have torch's number of threads by the knob within the block."""
    import torch

    own = torch.get_num_threads()
    if tuning.get("threads") != "half":
        yield
        return
    torch.set_num_threads(max(1, own // 2))
    try:
        yield
    finally:
        torch.set_num_threads(own)


def keep_to_quota() -> None:
    """Give torch at most as many threads as a container's quota has processors: torch does not know
    it, and more threads would be halted in the middle of a product."""
    import torch

    if (most := processors_of_quota(Path("/"))) < torch.get_num_threads():
        torch.set_num_threads(int(most))


def processors_of_quota(root: Path) -> float:
    """Return how many processors the control group of this process and those above it may use,
    rounded up; infinite without a limit (cgroup v2).

    Args:
        root: `/`; `proc/self/cgroup` under it names the group, and `cpu.max` in the folder of a
            group has microseconds and their period.
    """
    listed = root / "proc/self/cgroup"
    text = listed.read_text(errors="surrogateescape") if listed.is_file() else ""
    named = re.search(r"^0::/(.*)$", text, re.M)
    own = Path(named[1] if named else "")
    files = [root / "sys/fs/cgroup" / group / "cpu.max" for group in (own, *own.parents)]
    limits = [file.read_text().split() for file in files if file.is_file()]
    quotas = [math.ceil(int(quota) / int(period)) for quota, period in limits if quota != "max"]
    return min(quotas, default=math.inf)
