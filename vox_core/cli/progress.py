"""What is happening, on stderr: a live display on a terminal, plain lines elsewhere.

A display is told of events and of transfers (downloads, conversions, rows that are read) and shows
them in words that both forms share. Lines are kept few: every step of a short run, about twenty of
a long one, and of a transfer nothing that is over within a second.
Results are not shown here; they go to stdout (output.py).
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

import click

from vox_core.cli.output import duration, megabytes, printable
from vox_core.cli.streams import abandon_stderr
from vox_core.contract import (
    CheckpointWritten,
    Event,
    Notice,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)

SHORT_RUN = 50
LINES_OF_A_LONG_RUN = 20
RECENT_STEPS = 20
QUARTERS = 4
SMOOTHING = 0.9
"""Share of the past in the smoothed loss."""
WORTH_SECONDS = 1.0
"""Of a transfer that is shown: one that takes less is over before anybody asks."""


class Display(Protocol):
    """Shows what is happening until it is closed."""

    def observe(self, event: Event) -> None: ...

    def transfer(self, label: str, done: int, total: int) -> None:
        """Bytes done and in all; `total` is 0 while it is unknown."""
        ...

    def close(self) -> None: ...


@contextmanager
def display(*, by_the_way: bool = True) -> Iterator[Display]:
    """The display that suits stderr.

    Args:
        by_the_way: the work goes on if there is nobody left to show it to.
    """
    shown: Display
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from vox_core.cli.live import LiveDisplay

        shown = LiveDisplay()
    else:
        shown = LineDisplay()
    shown = Unhurried(shown)
    if by_the_way:
        shown = ByTheWay(shown)
    try:
        yield shown
    finally:
        shown.close()


class ByTheWay:
    """A display that never ends what it shows: it falls silent when stderr is gone."""

    def __init__(self, shown: Display) -> None:
        self.shown = shown
        self._gone = False

    def observe(self, event: Event) -> None:
        self._try(lambda: self.shown.observe(event))

    def transfer(self, label: str, done: int, total: int) -> None:
        self._try(lambda: self.shown.transfer(printable(label), done, total))

    def close(self) -> None:
        self._try(self.shown.close)

    def _try(self, show: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            show()
        except OSError as error:  # a full disk under a log may have room again
            self._gone = abandon_stderr(error)


class Unhurried:
    """A display that shows a transfer only once it has gone on for a second."""

    def __init__(self, shown: Display) -> None:
        self.shown = shown
        self._label, self._since = "", 0.0

    def observe(self, event: Event) -> None:
        self.shown.observe(event)

    def transfer(self, label: str, done: int, total: int) -> None:
        now = monotonic()
        if label != self._label:
            self._label, self._since = label, now
        if now - self._since >= WORTH_SECONDS:
            self.shown.transfer(label, done, total)

    def close(self) -> None:
        self.shown.close()


class Pace:
    """How fast a run is, and how long it will still take, by its most recent steps."""

    def __init__(self, start: RunStart) -> None:
        self._total = start.total_steps
        self._recent: deque[StepDone] = deque(maxlen=RECENT_STEPS)
        self._losses = self._weights = 0.0

    def describe(self, step: StepDone) -> str:
        """A step in words: loss, smoothed loss, learning rate, tokens/s, time left."""
        self._recent.append(step)
        smoothed = self._smoothed(step.loss)
        seconds = sum(each.seconds for each in self._recent)
        rate = sum(each.tokens for each in self._recent) / seconds if seconds else 0.0
        left = duration(seconds / len(self._recent) * (self._total - step.step))
        loss = f"loss {step.loss:.4f}  smoothed {smoothed:.4f}"
        return f"{loss}  lr {step.lr:.1e}  {rate:,.0f} tokens/s  {left} left"

    def _smoothed(self, loss: float) -> float:
        """Exponential moving average with bias correction (Adam, arXiv:1412.6980, section 3)."""
        if math.isfinite(loss):
            self._losses = SMOOTHING * self._losses + (1 - SMOOTHING) * loss
            self._weights = SMOOTHING * self._weights + (1 - SMOOTHING)
        return self._losses / self._weights if self._weights else loss


def words(event: Event) -> str | None:
    """What is said of an event in a line of its own; None for those that have none."""
    told = _told(event)
    return told and printable(told, lines=True)


def _told(event: Event) -> str | None:
    match event:
        case Notice(message, level):
            return message if level == "info" else f"warning: {message}"
        case RunStart():
            steps = f"steps {event.first_step} to {event.total_steps}"
            base = "" if event.quant == "none" else f", base in {event.quant},"
            return f"training {event.model} in {event.dtype}{base} on {event.device}, {steps}"
        case Validation(step, loss):
            return f"held-out loss {loss:.4f} {f'after step {step}' if step else 'before training'}"
        case RunEnd(step, outcome, seconds):
            return f"{outcome} after step {step}, in {duration(seconds)}"
        case _:
            return None


class LineDisplay:
    """Plain lines, for a file, a pipe or a log."""

    def __init__(self) -> None:
        self._start: RunStart | None = None
        self._pace: Pace | None = None
        self._transfer: tuple[str, int] | None = None

    def observe(self, event: Event) -> None:
        if isinstance(event, RunStart):
            self._start, self._pace = event, Pace(event)
        text = self._step(event) if isinstance(event, StepDone) else words(event)
        if isinstance(event, CheckpointWritten):
            text = f"checkpoint written after step {event.step}"
        if text:
            click.echo(text, err=True)

    def transfer(self, label: str, done: int, total: int) -> None:
        """A line when a transfer begins, and at every quarter of it."""
        reached = (label, QUARTERS * done // total if total else 0)
        if reached != self._transfer:
            self._transfer = reached
            of = f" of {megabytes(total)}" if total else ""
            click.echo(f"{label}: {megabytes(done)}{of}", err=True)

    def close(self) -> None:
        """Nothing is open."""

    def _step(self, event: StepDone) -> str | None:
        assert self._start and self._pace, "a step before the run"
        text, total = self._pace.describe(event), self._start.total_steps
        every = 1 if total <= SHORT_RUN else round(total / LINES_OF_A_LONG_RUN)
        if event.step % every and event.step not in (self._start.first_step, total):
            return None
        return f"step {event.step}/{total}  {text}"
