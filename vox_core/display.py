"""Progress: a bar on a terminal (rich) and in a notebook (IPython), plain lines elsewhere.

A display receives events and transfers (downloads, conversions, rows being read); all forms use the
same texts. Plain lines are few: every step of a short run, about twenty of a long one, and none for
a transfer that ends within a second. Bars and lines go to stderr; commands print their results to
stdout (cli/output.py).
"""

from __future__ import annotations

import errno
import html
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

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
from vox_core.text import duration, megabytes, printable, silence

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


Screen: TypeAlias = "Lines | Terminal | Notebook"
"""What a display draws on; `checkpoints` is whether each checkpoint gets a line. A run begins after
`step` steps; the `total` of a transfer is 0 while unknown."""


@contextmanager
def display(*, by_the_way: bool = True) -> Iterator[Display]:
    """Open the display for this process: for a notebook, a terminal, or plain lines.

    Args:
        by_the_way: the work continues if stderr is closed meanwhile.
    """
    if _in_notebook():
        screen: Screen = Notebook()
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        screen = Terminal()
    else:
        screen = Lines()
    opened = Display(screen, by_the_way=by_the_way)
    try:
        yield opened
    finally:
        opened.close()


class Display:
    """Shows events, and transfers after their first second; `by_the_way`, it falls silent when
    stderr is closed."""

    def __init__(self, screen: Screen, *, by_the_way: bool = True) -> None:
        self.screen, self._by_the_way, self._gone = screen, by_the_way, False
        self._label, self._since = "", 0.0
        self._pace, self._total = Pace(), 0

    def observe(self, event: Event) -> None:
        self._try(lambda: self._show(event))

    def transfer(self, label: str, done: int, total: int) -> None:
        now = monotonic()
        if label != self._label:
            self._label, self._since = label, now
        if now - self._since >= WORTH_SECONDS:
            self._try(lambda: self.screen.transfer(printable(label), done, total))

    def close(self) -> None:
        self._try(self.screen.close)

    def _show(self, event: Event) -> None:
        if isinstance(event, RunStart):  # before a line is written, which may fail
            self._pace, self._total = Pace(), event.total_steps
        elif isinstance(event, StepDone):
            self.screen.step(self._pace.describe(event), event.step, self._total)
        elif isinstance(event, ObjectiveMetrics):
            self._pace.metrics = event.metrics
        elif isinstance(event, RunEnd):
            self.screen.close()
        text = _line(event)
        if text and (self.screen.checkpoints or not isinstance(event, CheckpointWritten)):
            self.screen.line(printable(text, lines=True))
        if isinstance(event, RunStart):
            self.screen.begin(event.first_step - 1, event.total_steps)

    def _try(self, show: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            show()
        except OSError as error:  # a full disk under a log may get space again
            if not self._by_the_way:
                raise
            if error.errno in _GONE:
                self._gone = True
                silence(sys.stderr)


class Pace:
    """Loss and speed of a run, from its most recent steps."""

    def __init__(self) -> None:
        self._recent: deque[StepDone] = deque(maxlen=RECENT_STEPS)
        self._losses = self._weights = 0.0
        self.metrics: Mapping[str, float] = {}

    def describe(self, step: StepDone) -> str:
        """Format a step: loss, smoothed loss or the objective's first metric and `reward_std`,
        learning rate, tokens/s, time left."""
        self._recent.append(step)
        smoothed = self._smoothed(step.loss)
        seconds = sum(each.seconds for each in self._recent)
        rate = sum(each.tokens for each in self._recent) / seconds if seconds else 0.0
        name, value = next(iter(self.metrics.items()), ("smoothed", smoothed))
        loss, left = f"loss {step.loss:z.4f}  {name} {value:z.4f}", duration(step.seconds_left or 0)
        if (deviation := self.metrics.get("reward_std")) is not None:
            loss += f"  reward_std {deviation:z.4f}"
        return f"{loss}  lr {step.lr:.1e}  {rate:,.0f} tokens/s  {left} left"

    def _smoothed(self, loss: float) -> float:
        """Return the exponential moving average with bias correction (Adam, arXiv:1412.6980,
        section 3)."""
        if math.isfinite(loss):
            self._losses = SMOOTHING * self._losses + (1 - SMOOTHING) * loss
            self._weights = SMOOTHING * self._weights + (1 - SMOOTHING)
        return self._losses / self._weights if self._weights else loss


def _line(event: Event) -> str | None:
    """Format an event as a line; None for events without one."""
    match event:
        case Notice(message, level):
            return message if level == "info" else f"warning: {message}"
        case RunStart():
            if event.first_step > event.total_steps:
                return f"all {event.total_steps} steps are trained; writing the results"
            steps = f"steps {event.first_step} to {event.total_steps}"
            base = "" if event.quant == "none" else f", base in {event.quant},"
            return f"training {event.model} in {event.dtype}{base} on {event.device}, {steps}"
        case Validation(step, loss, reward, margin):
            measured = f"loss {loss:z.4f}"
            if reward is not None:
                measured = f"reward {reward:z.4f}" + (f" ± {margin:z.4f}" if margin else "")
            return f"validation {measured} {f'after step {step}' if step else 'before training'}"
        case Evaluation(step, scores):
            shown = "  ".join(f"{name} {score:z.4f}" for name, score in scores.items())
            return f"{shown} {f'after step {step}' if step else 'before training'}"
        case CheckpointWritten(step):
            return f"checkpoint written after step {step}"
        case RunEnd(step, outcome, seconds):
            return f"{outcome} after step {step}, in {duration(seconds)}"
        case _:
            return None


class Lines:
    """Plain lines on stderr, for a file, a pipe or a log."""

    checkpoints = True

    def __init__(self) -> None:
        self._before = 0
        self._transfer: tuple[str, int] | None = None

    def begin(self, step: int, total: int) -> None:
        self._before = step

    def step(self, text: str, step: int, total: int) -> None:
        every = 1 if total <= SHORT_RUN else round(total / LINES_OF_A_LONG_RUN)
        if step % every == 0 or step in (self._before + 1, total):
            self.line(f"step {step}/{total}  {text}")

    def line(self, text: str) -> None:
        click.echo(text, err=True)

    def transfer(self, label: str, done: int, total: int) -> None:
        """Print a line when a transfer starts, and at every quarter of it."""
        reached = (label, QUARTERS * done // total if total else 0)
        if reached != self._transfer:
            self._transfer = reached
            self.line(_transferred(label, done, total))

    def close(self) -> None: ...


class Terminal:
    """Lines, and below them a bar for the current transfer or run."""

    checkpoints = False

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True)
        self._bar: tuple[Progress, TaskID] | None = None
        self._label = ""

    def begin(self, step: int, total: int) -> None:
        self._open(total, step)

    def step(self, text: str, step: int, total: int) -> None:
        self._update(f"step {step}/{total}  {text}", step)

    def line(self, text: str) -> None:
        if self._label:
            self.close()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def transfer(self, label: str, done: int, total: int) -> None:
        if label != self._label:
            self.close()
            self._open(None, 0)
            self._label = label
        self._update(label, done, total or None)
        if done == total:
            self.close()

    def close(self) -> None:
        """End the bar, and continue below it."""
        if self._bar:
            self._bar[0].stop()
        self._bar, self._label = None, ""

    def _open(self, steps: int | None, completed: int) -> None:
        """Start the bar of a run, or without `steps` of a transfer."""
        from rich import progress as rich

        text = rich.TextColumn("{task.description}", markup=False)
        bar = rich.BarColumn(bar_width=BAR_WIDTH)
        sizes = (rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
        columns = (text, bar, *(sizes if steps is None else ()))
        progress = rich.Progress(*columns, console=self._console)
        progress.start()
        self._bar = progress, progress.add_task("starting", total=steps, completed=completed)

    def _update(self, description: str, completed: int, total: int | None = None) -> None:
        if self._bar:
            progress, task = self._bar
            progress.update(task, description=description, completed=completed, total=total)


class Notebook:
    """A notebook cell's output, updated in place: lines, and the bar below them."""

    checkpoints = False

    def __init__(self) -> None:
        from IPython import display

        self._lines: list[str] = []
        self._bar = ("", 0, 0)
        show: Any = display.display  # untyped
        self._handle = show({"text/plain": ""}, raw=True, display_id=True)

    def begin(self, step: int, total: int) -> None: ...

    def step(self, text: str, step: int, total: int) -> None:
        self._update(f"step {step}/{total}  {text}", step, total)

    def line(self, text: str) -> None:
        self._lines.append(text)
        self._update(*self._bar)

    def transfer(self, label: str, done: int, total: int) -> None:
        self._update(_transferred(label, done, total), done, total)

    def close(self) -> None:
        label, done, total = self._bar
        self._lines += [label] if label else []
        self._bar = "", done, total

    def _update(self, label: str, done: int, total: int) -> None:
        self._bar = label, done, total
        text = "\n".join(filter(None, [*self._lines, label]))
        bar = f'<progress value="{done}" max="{total}"></progress>' if total else ""
        shown = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>{bar}"}
        self._handle.update(shown, raw=True)


def _transferred(label: str, done: int, total: int) -> str:
    of = f" of {megabytes(total)}" if total else ""
    return f"{label}: {megabytes(done)}{of}"


def _in_notebook() -> bool:
    """Whether this code runs in a Jupyter kernel rather than another IPython shell."""
    shell = ipython.get_ipython() if (ipython := sys.modules.get("IPython")) else None
    return hasattr(shell, "kernel")
