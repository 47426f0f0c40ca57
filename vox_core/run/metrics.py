"""What the core measures of a run: peak memory, remaining time, the time before the first step.

Time is counted from step to step, so that validations and checkpoints between them are in it; a
step's own `seconds` are the backend's. Reading memory takes 20 µs where there is /proc.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from vox_core.contract import StepDone

RECENT = 20
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)
_OBJECTS = 50_000
"""New objects between two garbage collections; Python's own number is 700. Cycles that hold tensors
are still found before the first step, if there are many of them."""


class StepMetrics:
    """Adds peak memory, remaining time and startup time to the steps of one process.

    Args:
        total_steps: the last step of the run.
        startup: ends with the first step.
        clock: in seconds, never going back.

    Attributes:
        startup_seconds: from the start of the command to the end of the first step.
    """

    def __init__(
        self,
        total_steps: int,
        startup: Startup | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._total, self._startup, self._clock = total_steps, startup, clock
        self._took: deque[float] = deque(maxlen=RECENT)
        self._before: float | None = None
        self.startup_seconds: float | None = None

    def measured(self, step: StepDone) -> StepDone:
        """The step with `memory`, unless its backend measured it, and the times."""
        now = self._clock()
        # What came before the first step, such as loading the model, will not come again.
        self._took.append(step.seconds if self._before is None else now - self._before)
        mean = sum(self._took) / len(self._took)
        startup = None
        if self._before is None and self._startup:
            startup = self.startup_seconds = round(self._startup.finish(), 3)
        self._before = now
        return replace(
            step,
            memory=peak_resident() if step.memory is None else step.memory,
            seconds_left=round(mean * max(self._total - step.step, 0), 1),
            startup_seconds=startup,
        )


class Startup:
    """From `began`, as `time.perf_counter` counts, until `finish`, or the end of the block.

    Meanwhile Python collects garbage a hundred times less often: importing makes a million objects
    that stay, and each collection would walk all of them for nothing.
    """

    def __init__(self, began: float | None = None) -> None:
        self.began = time.perf_counter() if began is None else began
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
        return time.perf_counter() - self.began

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


def peak_resident() -> int | None:
    """The most bytes of this process that were in memory at once; None where nothing says so."""
    with contextlib.suppress(OSError):
        # Unlike ru_maxrss it owes nothing to the process that started this one.
        if found := _PEAK.search(Path("/proc/self/status").read_bytes()):
            return int(found[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
