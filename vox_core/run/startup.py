"""The time before the first step: how long it is, and what it does without.

It is counted from where the process began, for a command, and from the call, for a caller in
Python. Meanwhile Python looks for garbage in cycles a hundred times less often: importing makes a
million objects that stay, and each look at all of them finds nothing.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_OBJECTS = 50_000
"""New objects between two looks; Python's own number is 700. Cycles that hold tensors are still
found before the first step, if there are many of them."""


class Startup:
    """From `began`, as `time.perf_counter` counts, until `finish`, or the end of the block."""

    def __init__(self, began: float | None = None) -> None:
        self._began = time.perf_counter() if began is None else began
        self._thresholds: tuple[int, int, int] | None = None

    def __enter__(self) -> Self:
        self._thresholds = gc.get_threshold()
        if self._thresholds[0]:  # 0: the caller has switched it off
            gc.set_threshold(_OBJECTS, *self._thresholds[1:])
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._restore()

    def finish(self) -> float:
        """The first step is done: seconds from the beginning."""
        self._restore()
        return time.perf_counter() - self._began

    def _restore(self) -> None:
        if self._thresholds is not None:
            gc.set_threshold(*self._thresholds)
        self._thresholds = None


def process_began() -> float | None:
    """When this process did, as `time.perf_counter` counts; None where the system does not say."""
    try:
        # After the command's name, which may hold anything: field 22, in ticks since the machine's.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[22 - 3])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.perf_counter() - age
