"""Measurements of a run across resumes: losses, validations, skipped steps, memory, times.

Each checkpoint holds `Progress` up to its step, so a resumed run decides as the uninterrupted one
would have. A better validation is strictly lower; one that is not a number never is. The validation
before the first step does not count: it is the base model's.

Time is counted from step to step, so that validations and checkpoints between them are in it; a
step's own `seconds` are the backend's. Reading memory takes 20 µs where there is /proc.
"""

from __future__ import annotations

import contextlib
import math
import re
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vox_core.contract import Event, StepDone, StepSkipped, Validation
from vox_core.run.telemetry import finite

RECENT = 20
"""Steps whose mean time the remaining time is counted with."""
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)


class Progress:
    """Follows the steps and validations of a run.

    Args:
        patience: so many validations without a better one exhaust it; 0: never.
        losses, validations, skipped_in_a_row: from before, None for what is not finite.

    Attributes:
        losses: of the steps that were applied, in order.
        validations: (step, loss), step 0 before training.
        best_step, best_loss: of the best validation; None and infinity while there is none.
        since_best: validations after it.
        skipped_in_a_row: steps since the last one that was applied.
    """

    def __init__(
        self,
        patience: int = 0,
        losses: Iterable[float | None] = (),
        validations: Iterable[tuple[int, float | None]] = (),
        skipped_in_a_row: int = 0,
    ) -> None:
        self._patience, self.skipped_in_a_row = patience, skipped_in_a_row
        self.losses = [math.nan if loss is None else loss for loss in losses]
        self.validations: list[tuple[int, float]] = []
        self.best_step: int | None = None
        self.best_loss, self.since_best = math.inf, 0
        for step, loss in validations:
            self._validated(step, math.nan if loss is None else loss)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.losses.append(event.loss)
            self.skipped_in_a_row = 0
        elif isinstance(event, StepSkipped):
            self.skipped_in_a_row += 1
        elif isinstance(event, Validation):
            self._validated(event.step, event.loss)

    def _validated(self, step: int, loss: float) -> None:
        self.validations.append((step, loss))
        if not step:
            return
        if loss < self.best_loss:
            self.best_step, self.best_loss, self.since_best = step, loss, 0
        else:
            self.since_best += 1

    @property
    def exhausted(self) -> bool:
        """Whether `patience` validations have brought no better one."""
        return bool(self._patience) and self.since_best >= self._patience

    @property
    def first_and_last(self) -> tuple[float, float] | tuple[None, None]:
        """Validation loss before training and the last one; None where either is missing, as after
        a resume on other validation rows."""
        if len(self.validations) < 2 or self.validations[0][0]:
            return None, None
        return self.validations[0][1], self.validations[-1][1]

    def saved(self) -> dict[str, Any]:
        """The fields of a checkpoint's `Origin`."""
        return {
            "losses": tuple(map(finite, self.losses)),
            "validations": tuple((step, finite(loss)) for step, loss in self.validations),
            "skipped_in_a_row": self.skipped_in_a_row,
        }


class StepMetrics:
    """Adds peak memory, remaining time and startup time to the steps of one process.

    Args:
        began: when planning did, as `clock` counts.
        clock: in seconds, never going back.

    Attributes:
        startup_seconds: from the start of planning to the end of the first step.
    """

    def __init__(
        self, total_steps: int, began: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._total, self._began, self._clock = total_steps, began, clock
        self._took: deque[float] = deque(maxlen=RECENT)
        self._before = began
        self.startup_seconds: float | None = None

    def begin(self) -> None:
        """Count the first step from now: what came before, such as loading, will not recur."""
        self._before = self._clock()

    def measured(self, step: StepDone) -> StepDone:
        """The step with `memory`, unless its backend measured it, and the times."""
        now, startup = self._clock(), None
        self._took.append(now - self._before)
        if self.startup_seconds is None:
            startup = self.startup_seconds = round(now - self._began, 3)
        self._before = now
        mean = sum(self._took) / len(self._took)
        return replace(
            step,
            memory=peak_resident() if step.memory is None else step.memory,
            seconds_left=round(mean * max(self._total - step.step, 0), 1),
            startup_seconds=startup,
        )


def peak_resident() -> int:
    """The most bytes of this process that were in memory at once."""
    with contextlib.suppress(OSError):
        # Unlike ru_maxrss it owes nothing to the process that started this one.
        if found := _PEAK.search(Path("/proc/self/status").read_bytes()):
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
