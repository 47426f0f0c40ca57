"""The engine's knobs of the manifest's `[tuning]`, which change speed, not results.

    layout     end-to-end if the model allows it, or padded rows
    threads    default, torch's own number, or half of it: hyper-threads and slow cores can cost
               more than they bring

The default of each is its first value.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping


def wants_rows(tuning: Mapping[str, str]) -> bool:
    """Whether the knob selects padded rows."""
    return tuning.get("layout") == "padded"


def set_threads(tuning: Mapping[str, str]) -> None:
    """Set torch's number of threads by the knob, for the rest of this process."""
    import torch

    own = _own_threads()
    wanted = max(1, own // 2) if tuning.get("threads") == "half" else own
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


@functools.cache
def _own_threads() -> int:
    """Return torch's number of threads before the first run of this process."""
    import torch

    return torch.get_num_threads()
