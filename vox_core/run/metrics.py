"""What the core measures of a run: peak memory, remaining time, the time before the first step.

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


class StepMetrics:
    """Adds peak memory, remaining time and startup time to the steps of one process.

    Args:
        total_steps: the last step of the run.
        began: when the command did, as `clock` counts.
        clock: in seconds, never going back.

    Attributes:
        startup_seconds: from the start of the command to the end of the first step.
    """

    def __init__(
        self,
        total_steps: int,
        began: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._total, self._began, self._clock = total_steps, began, clock
        self._took: deque[float] = deque(maxlen=RECENT)
        self._before: float | None = None
        self.startup_seconds: float | None = None

    def measured(self, step: StepDone) -> StepDone:
        """The step with `memory`, unless its backend measured it, and the times."""
        now, startup = self._clock(), None
        # What came before the first step, such as loading the model, will not come again.
        self._took.append(step.seconds if self._before is None else now - self._before)
        if self._before is None and self._began is not None:
            startup = self.startup_seconds = round(now - self._began, 3)
        self._before = now
        mean = sum(self._took) / len(self._took)
        return replace(
            step,
            memory=peak_resident() if step.memory is None else step.memory,
            seconds_left=round(mean * max(self._total - step.step, 0), 1),
            startup_seconds=startup,
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
