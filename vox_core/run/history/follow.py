"""The lines of a run as they come, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vox_core.run.folder import TELEMETRY
from vox_core.run.history.find import completed, is_worked_in, require_run
from vox_core.run.history.summary import Summary, Tally
from vox_core.run.lines import Lines, Told

SECONDS = 0.5
"""Between two looks."""


def follow(
    folder: Path, wait: Callable[[float], None] = time.sleep
) -> Iterator[tuple[list[Told], Summary]]:
    """What was told before, then what has come at each look, with the summary that it leads to.

    It ends with the run, or at once if the run has ended or died.

    Raises:
        AdapterError: A001, it is no run, or its telemetry cannot be read.
    """
    lines, tally = Lines(require_run(folder) / TELEMETRY), Tally(str(folder))
    while True:
        worked_in = is_worked_in(folder)  # before the look: see `summary_of`
        told = list(lines.new())
        tally.add(told)
        yield told, completed(tally, lines, folder, worked_in)
        if tally.outcome or not worked_in:
            return
        wait(SECONDS)
