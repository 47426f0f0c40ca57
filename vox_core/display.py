"""Progress: a bar on a terminal (rich) and in a notebook (IPython), plain lines elsewhere.

A display receives events and transfers (downloads, conversions, rows being read); all forms use the
same texts. Plain lines are few: every step of a short run, about twenty of a long one, and none for
a transfer that ends within a second. Bars and lines go to stderr; commands print their results to
stdout (cli/output.py).
"""

from __future__ import annotations

import contextlib
import errno
import html
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import click

from vox_core.contract import (
    CheckpointWritten,
    Evaluation,
    Event,
    Notice,
    ObjectiveMetrics,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)
from vox_core.text import duration, megabytes, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

SHORT_RUN = 50
LINES_OF_A_LONG_RUN = 20
RECENT_STEPS = 20
QUARTERS = 4
SMOOTHING = 0.9
"""Share of the past in the smoothed loss."""
WORTH_SECONDS = 1.0
"""Seconds after which a transfer is shown."""
BAR_WIDTH = 24
_GONE = {errno.EPIPE, errno.EIO}
"""The reader of a pipe has ended; the terminal has been closed."""


class Display(Protocol):
    """A progress display; `close` ends it."""

    def observe(self, event: Event) -> None: ...

    def transfer(self, label: str, done: int, total: int) -> None:
        """Show bytes done and in total; `total` is 0 while unknown."""
        ...

    def close(self) -> None: ...


@contextmanager
def display(*, by_the_way: bool = True) -> Iterator[Display]:
    """Open the display for this process: for a notebook, a terminal, or plain lines.

    Args:
        by_the_way: the work continues if stderr is closed meanwhile.
    """
    if _in_notebook():
        shown: Display = NotebookDisplay()
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        shown = LiveDisplay()
    else:
        shown = LineDisplay()
    opened = Opened(shown, by_the_way=by_the_way)
    try:
        yield opened
    finally:
        opened.close()


class Opened:
    """A display that shows a transfer only after its first second, and, `by_the_way`, falls silent
    when stderr is closed."""

    def __init__(self, shown: Display, *, by_the_way: bool) -> None:
        self.shown, self._by_the_way, self._gone = shown, by_the_way, False
        self._label, self._since = "", 0.0

    def observe(self, event: Event) -> None:
        self._try(lambda: self.shown.observe(event))

    def transfer(self, label: str, done: int, total: int) -> None:
        now = monotonic()
        if label != self._label:
            self._label, self._since = label, now
        if now - self._since >= WORTH_SECONDS:
            self._try(lambda: self.shown.transfer(printable(label), done, total))

    def close(self) -> None:
        self._try(self.shown.close)

    def _try(self, show: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            show()
        except OSError as error:  # a full disk under a log may get space again
            if not self._by_the_way:
                raise
            self._gone = abandon_stderr(error)


def abandon_stderr(error: OSError) -> bool:
    """Redirect stderr to /dev/null if its reader is gone; return whether it is."""
    if error.errno not in _GONE:
        return False
    nothing = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # sys.stderr was replaced
        os.dup2(nothing, sys.stderr.fileno())
    os.close(nothing)
    return True


class Pace:
    """Loss, speed and remaining time of a run, from its most recent steps."""

    def __init__(self, start: RunStart) -> None:
        self.start = start
        self._recent: deque[StepDone] = deque(maxlen=RECENT_STEPS)
        self._losses = self._weights = 0.0
        self.metrics: Mapping[str, float] = {}

    def describe(self, step: StepDone) -> str:
        """Format a step: loss, smoothed loss or the objective's first metric, learning rate,
        tokens/s, time left."""
        self._recent.append(step)
        smoothed = self._smoothed(step.loss)
        seconds = sum(each.seconds for each in self._recent)
        rate = sum(each.tokens for each in self._recent) / seconds if seconds else 0.0
        left = step.seconds_left
        if left is None:
            left = seconds / len(self._recent) * (self.start.total_steps - step.step)
        name, value = next(iter(self.metrics.items()), ("smoothed", smoothed))
        loss = f"loss {step.loss:.4f}  {name} {value:.4f}"
        return f"{loss}  lr {step.lr:.1e}  {rate:,.0f} tokens/s  {duration(left)} left"

    def _smoothed(self, loss: float) -> float:
        """Return the exponential moving average with bias correction (Adam, arXiv:1412.6980,
        section 3)."""
        if math.isfinite(loss):
            self._losses = SMOOTHING * self._losses + (1 - SMOOTHING) * loss
            self._weights = SMOOTHING * self._weights + (1 - SMOOTHING)
        return self._losses / self._weights if self._weights else loss


def _pace_after(event: Event, pace: Pace | None) -> Pace | None:
    """Return the pace of the run that an event belongs to, with the newest metrics."""
    if isinstance(event, ObjectiveMetrics) and pace:
        pace.metrics = event.metrics
    return Pace(event) if isinstance(event, RunStart) else pace


def words(event: Event) -> str | None:
    """Format an event as a line; None for events without one."""
    text = _line(event)
    return text and printable(text, lines=True)


def _line(event: Event) -> str | None:
    match event:
        case Notice(message, level):
            return message if level == "info" else f"warning: {message}"
        case RunStart():
            steps = f"steps {event.first_step} to {event.total_steps}"
            base = "" if event.quant == "none" else f", base in {event.quant},"
            return f"training {event.model} in {event.dtype}{base} on {event.device}, {steps}"
        case Validation(step, loss, reward, margin):
            measured = f"loss {loss:.4f}"
            if reward is not None:
                measured = f"reward {reward:.4f}" + (f" ± {margin:.4f}" if margin else "")
            return f"validation {measured} {f'after step {step}' if step else 'before training'}"
        case Evaluation(step, scores):
            shown = "  ".join(f"{name} {score:.4f}" for name, score in scores.items())
            return f"{shown} {f'after step {step}' if step else 'before training'}"
        case RunEnd(step, outcome, seconds):
            return f"{outcome} after step {step}, in {duration(seconds)}"
        case _:
            return None


class LineDisplay:
    """Plain lines on stderr, for a file, a pipe or a log."""

    def __init__(self) -> None:
        self._pace: Pace | None = None
        self._transfer: tuple[str, int] | None = None

    def observe(self, event: Event) -> None:
        self._pace = _pace_after(event, self._pace)
        text = self._step(event) if isinstance(event, StepDone) else words(event)
        if isinstance(event, CheckpointWritten):
            text = f"checkpoint written after step {event.step}"
        if text:
            click.echo(text, err=True)

    def transfer(self, label: str, done: int, total: int) -> None:
        """Print a line when a transfer starts, and at every quarter of it."""
        reached = (label, QUARTERS * done // total if total else 0)
        if reached != self._transfer:
            self._transfer = reached
            of = f" of {megabytes(total)}" if total else ""
            click.echo(f"{label}: {megabytes(done)}{of}", err=True)

    def close(self) -> None:
        """Do nothing."""

    def _step(self, event: StepDone) -> str | None:
        assert self._pace, "a step before the run"
        text, start = self._pace.describe(event), self._pace.start
        total = start.total_steps
        every = 1 if total <= SHORT_RUN else round(total / LINES_OF_A_LONG_RUN)
        if event.step % every and event.step not in (start.first_step, total):
            return None
        return f"step {event.step}/{total}  {text}"


class LiveDisplay:
    """A bar for the current transfer or run on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True)
        self._bar: tuple[Progress, TaskID] | None = None
        self._label = ""
        self._pace: Pace | None = None

    def observe(self, event: Event) -> None:
        self._pace = _pace_after(event, self._pace)
        if isinstance(event, StepDone):
            assert self._pace, "a step before the run"
            self._update(self._pace.describe(event), event.step)
            return
        if isinstance(event, RunEnd) or self._label:
            self.close()
        if text := words(event):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        if isinstance(event, RunStart):
            self._open(event.total_steps, event.first_step - 1)

    def transfer(self, label: str, done: int, total: int) -> None:
        if label != self._label:
            self.close()
            self._open(None, 0)
            self._label = label
        self._update(label, done, total or None)
        if done == total:
            self.close()

    def close(self) -> None:
        """Leave the bar in place and continue below it."""
        if self._bar:
            self._bar[0].stop()
        self._bar, self._label = None, ""

    def _open(self, steps: int | None, completed: int) -> None:
        """Start the bar of a run, or without `steps` of a transfer."""
        from rich import progress as rich

        text = rich.TextColumn("{task.description}", markup=False)
        bar = rich.BarColumn(bar_width=BAR_WIDTH)
        sizes = (rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
        run = (rich.TextColumn("step"), rich.MofNCompleteColumn(), bar, text)
        columns = (text, bar, *sizes) if steps is None else run
        progress = rich.Progress(*columns, console=self._console)
        progress.start()
        self._bar = progress, progress.add_task("starting", total=steps, completed=completed)

    def _update(self, description: str, completed: int, total: int | None = None) -> None:
        if self._bar:
            progress, task = self._bar
            progress.update(task, description=description, completed=completed, total=total)


class NotebookDisplay:
    """A notebook cell's output, updated in place: lines, and the bar below them."""

    def __init__(self) -> None:
        from IPython import display

        self._lines: list[str] = []
        self._bar = ("", 0, 0)
        self._pace: Pace | None = None
        show: Any = display.display  # untyped
        self._handle = show({"text/plain": ""}, raw=True, display_id=True)

    def observe(self, event: Event) -> None:
        self._pace = _pace_after(event, self._pace)
        if isinstance(event, StepDone):
            assert self._pace, "a step before the run"
            total = self._pace.start.total_steps
            label = f"step {event.step}/{total}  {self._pace.describe(event)}"
            self._bar = label, event.step, total
        elif isinstance(event, RunEnd):
            label, done, total = self._bar
            self._lines.append(label)
            self._bar = "", done, total
        if text := words(event):
            self._lines.append(text)
        self._update()

    def transfer(self, label: str, done: int, total: int) -> None:
        of = f" of {megabytes(total)}" if total else ""
        self._bar = f"{label}: {megabytes(done)}{of}", done, total
        self._update()

    def close(self) -> None:
        """Leave the output as it is."""

    def _update(self) -> None:
        label, done, total = self._bar
        text = "\n".join(filter(None, [*self._lines, label]))
        bar = f'<progress value="{done}" max="{total}"></progress>' if total else ""
        shown = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>{bar}"}
        self._handle.update(shown, raw=True)


def _in_notebook() -> bool:
    """Whether this code runs in a Jupyter kernel rather than another IPython shell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")
