"""Show a run of another process on the display of `vox train`, from its telemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vox_core.api.progress import RECENT_STEPS, Display, display
from vox_core.api.runs import TELEMETRY, Summary, Tail, is_worked_in, read_run, require_run
from vox_core.contract import Event, Resumed, RunEnd, RunStart, StepDone

SECONDS = 0.5
"""Between two looks."""


def follow(folder: Path, wait: Callable[[float], None] = time.sleep) -> Iterator[list[Event]]:
    """Yield the events so far, then new events at each poll.

    Stops when the run ends, or at once if it has ended or died.

    Raises:
        AdapterError: A001, it is no run, or its telemetry cannot be read.
    """
    lines, ended = Tail(require_run(folder) / TELEMETRY), False
    while True:
        worked_in = is_worked_in(folder)  # before the poll: see `read_run`
        events = [each.event for each in lines.new()]
        for event in events:
            if isinstance(event, RunStart | Resumed | RunEnd):
                ended = isinstance(event, RunEnd)
        yield events
        if ended or not worked_in:
            return
        wait(SECONDS)


def shown_until_the_end(run: Path) -> Summary:
    """Show the run until it ends; return its summary.

    Raises:
        AdapterError: A001, it is no run, or its telemetry cannot be read.
    """
    with display(by_the_way=False) as shown:
        begun, looks = False, follow(run)
        for event in _recent(next(looks)):
            begun = _show(shown, event, begun)
        for events in looks:
            for event in events:
                begun = _show(shown, event, begun)
    return read_run(run)


def _recent(events: Sequence[Event]) -> Iterator[Event]:
    """Select past events to show: the last start, enough steps for a pace, and as many validations
    and metrics of the objective."""
    starts = [at for at, event in enumerate(events) if isinstance(event, RunStart)]
    if starts:
        since = events[starts[-1] :]
        shown = {0, len(since) - 1}
        for name in ("step", "validation", "objective"):
            told = [at for at, event in enumerate(since) if event.name == name]
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
