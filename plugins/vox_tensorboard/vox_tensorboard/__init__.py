"""TensorBoard for vox: write the curves of each run as event files in `RUN/tensorboard`.

    tensorboard --logdir runs

vox runs this plugin in its own process and sends it one event after another. The plugin turns the
numbers of each into scalars, and writes them with the package `tensorboard`, without TensorFlow and
without torch. To write for another tracker, replace `curves.py`; most take what `scalars` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.contract import Event, RunEnd, RunStart
from vox_core.hookspecs import hookimpl
from vox_tensorboard.scalars import scalars, step_of

if TYPE_CHECKING:
    from vox_tensorboard.curves import Curves


class TensorBoard:
    """The tracker; it writes one run after another."""

    def __init__(self) -> None:
        self._start: RunStart | None = None
        self._curves: Curves | None = None

    @hookimpl
    def vox_event(self, event: Event) -> None:
        """Write the numbers of an event, flushed to disk."""
        if isinstance(event, RunStart):
            self._close()
            self._start = event
        elif values := scalars(event):
            self._opened().add(step_of(event), values)
        if isinstance(event, RunEnd):
            self._close()
            self._start = None

    def _opened(self) -> Curves:
        """Create the writer at the first number, so that a refused run leaves no folder."""
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
