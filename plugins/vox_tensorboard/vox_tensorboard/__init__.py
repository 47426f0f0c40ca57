"""TensorBoard for vox: the curves of each run as event files in `RUN/tensorboard`.

    tensorboard --logdir runs

An observer has a process of its own, which hears of one event after another. This one turns the
numbers of each into scalars, and writes them with the writer of the package `tensorboard`, without
TensorFlow and without torch. To write for another tracker, replace `curves.py`: what `scalars`
gives is what most of them take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.contract import Event, RunEnd, RunStart
from vox_core.hookspecs import hookimpl
from vox_tensorboard.scalars import scalars, step_of

if TYPE_CHECKING:
    from vox_tensorboard.curves import Curves


class TensorBoard:
    """Of one run after the other, each from its start to its end."""

    def __init__(self) -> None:
        self._start: RunStart | None = None
        self._curves: Curves | None = None

    @hookimpl
    def vox_event(self, event: Event) -> None:
        """Write what the event has of numbers; each is on the disk when this returns."""
        if isinstance(event, RunStart):
            self._close()
            self._start = event
        elif values := scalars(event):
            self._opened().add(step_of(event), values)
        if isinstance(event, RunEnd):
            self._close()
            self._start = None

    def _opened(self) -> Curves:
        """Made for the first number: a run that is refused before it leaves no folder behind."""
        from vox_tensorboard.curves import Curves

        assert self._start, "a number before the run"
        if self._curves is None:
            self._curves = Curves(self._start)
        return self._curves

    def _close(self) -> None:
        if self._curves is not None:
            self._curves.close()
        self._curves = None


observer = TensorBoard()
