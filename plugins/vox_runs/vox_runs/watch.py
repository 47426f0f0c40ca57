"""Show a run of another process on the display of `vox train`, from its telemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vox_core.api.progress import RECENT_STEPS, Display, display
from vox_core.api.runs import (
    TELEMETRY,
    Line,
    Summary,
    Tail,
    Tally,
    completed,
    is_worked_in,
    require_run,
)
from vox_core.contract import Event, RunStart, StepDone, Validation

SECONDS = 0.5
"""Between two looks."""


def follow(
    folder: Path, wait: Callable[[float], None] = time.sleep
) -> Iterator[tuple[list[Line], Summary]]:
    """Yield the events so far, then new events at each poll, each time with the run's summary.

    Stops when the run ends, or at once if it has ended or died.

    Raises:
        AdapterError: A001, it is no run, or its telemetry cannot be read.
    """
    lines, tally = Tail(require_run(folder) / TELEMETRY), Tally(str(folder))
    while True:
        worked_in = is_worked_in(folder)  # before the poll: see `read_run`
        told = list(lines.new())
        tally.add(told)
        yield told, completed(tally, lines, folder, worked_in)
        if tally.outcome or not worked_in:
            return
        wait(SECONDS)


def shown_until_the_end(run: Path) -> Summary:
    """Show the run until it ends; return its summary.

    Raises:
        AdapterError: A001, it is no run, or its telemetry cannot be read.
    """
    with display(by_the_way=False) as shown:
        begun, looks = False, follow(run)
        told, summary = next(looks)
        for event in _recent([each.event for each in told]):
            begun = _show(shown, event, begun)
        for told, summary in looks:  # noqa: B007  (the last one is returned)
            for each in told:
                begun = _show(shown, each.event, begun)
    return summary


def _recent(events: Sequence[Event]) -> Iterator[Event]:
    """Select past events to show: the last start, enough steps for a pace, and as many validation
    losses."""
    starts = [at for at, event in enumerate(events) if isinstance(event, RunStart)]
    if starts:
        since = events[starts[-1] :]
        shown = {0, len(since) - 1}
        for kind in (StepDone, Validation):
            told = [at for at, event in enumerate(since) if isinstance(event, kind)]
            shown.update(told[-RECENT_STEPS:])
        yield from (since[at] for at in sorted(shown))


def _show(shown: Display, event: Event, begun: bool) -> bool:
    """Show an event; return whether a start was shown, before which steps cannot be."""
    if isinstance(event, RunStart):
        shown.close()  # the bar of a run that died and was resumed
        begun = True
    if begun or not isinstance(event, StepDone):
        shown.observe(event)
    return begun
