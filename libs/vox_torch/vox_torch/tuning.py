"""The engine's knobs, which a plugin names in `[tuning]` of its manifest: speed, and no number.

    layout     end-to-end where the model allows it, or padded rows
    threads    default, as many as torch takes by itself, or half of them: cores that share their
               arithmetic, or are slow ones, can cost more than they bring

Left alone, each is the first of its values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping


def wants_rows(tuning: Mapping[str, str]) -> bool:
    """Whether padded rows are to be taken, though the model may allow end to end."""
    return tuning.get("layout") == "padded"


def set_threads(tuning: Mapping[str, str]) -> None:
    """Let torch have as many threads as the knob says, in this process from now on."""
    import torch

    own = _own_threads()
    wanted = max(1, own // 2) if tuning.get("threads") == "half" else own
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


@functools.cache
def _own_threads() -> int:
    """What torch took by itself, or was told before the first run of this process."""
    import torch

    return torch.get_num_threads()
