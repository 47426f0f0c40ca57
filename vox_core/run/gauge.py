"""What the core adds to a step before it is told of: memory, and the time that is left.

Time is counted from step to step, so that validations and checkpoints between them are in it; a
step's own `seconds` are the backend's. Reading memory takes 20 µs where there is /proc.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vox_core.contract import StepDone

RECENT = 20
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)


class Gauge:
    """For the steps of one process.

    Args:
        total_steps: the last step of the run.
        clock: in seconds, never going back.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._total, self._clock = total_steps, clock
        self._took: deque[float] = deque(maxlen=RECENT)
        self._before: float | None = None

    def read(self, step: StepDone) -> StepDone:
        """The step with `memory`, unless its backend has told, and `seconds_left`."""
        now = self._clock()
        # What came before the first step, the model's loading for one, will not come again.
        self._took.append(step.seconds if self._before is None else now - self._before)
        self._before = now
        mean = sum(self._took) / len(self._took)
        return replace(
            step,
            memory=peak_resident() if step.memory is None else step.memory,
            seconds_left=round(mean * max(self._total - step.step, 0), 1),
        )


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
