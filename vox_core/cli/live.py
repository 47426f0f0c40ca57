"""The display on a terminal: one bar at the bottom, what has to stay above it (rich)."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from vox_core.cli.progress import Pace, words
from vox_core.contract import Event, RunEnd, RunStart, StepDone

BAR_WIDTH = 24


class LiveDisplay:
    """A bar for the transfer or the run that is going on."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: tuple[Progress, TaskID] | None = None
        self._label = ""
        self._pace: Pace | None = None

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._step(event)
            return
        if isinstance(event, RunEnd) or self._label:
            self.close()
        if text := words(event):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        if isinstance(event, RunStart):
            self._pace = Pace(event)
            columns = (TextColumn("step"), MofNCompleteColumn(), _bar(), _description())
            self._open(*columns, total=event.total_steps, completed=event.first_step - 1)

    def transfer(self, label: str, done: int, total: int) -> None:
        if label != self._label:
            self.close()
            speed = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._open(_description(), _bar(), *speed, total=None, completed=0)
            self._label = label
        self._update(label, done, total or None)
        if done == total:
            self.close()

    def close(self) -> None:
        """Leave the bar as it is and go on below it."""
        if self._bar:
            self._bar[0].stop()
        self._bar, self._label = None, ""

    def _step(self, event: StepDone) -> None:
        assert self._pace, "a step before the run"
        self._update(self._pace.describe(event), event.step)

    def _open(self, *columns: ProgressColumn, total: int | None, completed: int) -> None:
        progress = Progress(*columns, console=self._console)
        progress.start()
        self._bar = progress, progress.add_task("starting", total=total, completed=completed)

    def _update(self, description: str, completed: int, total: int | None = None) -> None:
        if self._bar:
            progress, task = self._bar
            progress.update(task, description=description, completed=completed, total=total)


def _bar() -> BarColumn:
    return BarColumn(bar_width=BAR_WIDTH)


def _description() -> TextColumn:
    return TextColumn("{task.description}", markup=False)
