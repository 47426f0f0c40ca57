"""The thread that computes on one base: jobs in their order, and sampling between them.

Each round runs one job and then one decoding step of the running batch, so that training and
sampling go on side by side. Nothing else may use the trainer.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vox_core.api.generating import Generator, Prompt, Token

log = logging.getLogger("vox_tinker")


@dataclass(slots=True, eq=False)
class Row:
    """A sequence to sample.

    Args:
        finished: called on the engine's thread once it has ended, failed or been cancelled.
        tokens: those sampled so far.
    """

    prompt: Prompt
    finished: Callable[[Row], None]
    tokens: list[Token] = field(default_factory=list)
    failed: str = ""
    cancelled: bool = False


class Engine:
    """Computes until it is closed."""

    def __init__(self, generator: Generator) -> None:
        self.waiting = 0
        self._rows, self._numbers = generator.rows(log_probs=True), itertools.count()
        self._generator = generator
        self._jobs: deque[Callable[[], None]] = deque()
        self._queue: deque[Row] = deque()
        self._running: dict[int, Row] = {}
        self._changed, self._closing = Condition(), False
        self._thread = Thread(target=self._run, name="vox-tinker-engine", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job, which must not raise."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def sample(self, rows: Sequence[Row]) -> None:
        """Queue rows; only from a job."""
        self._queue.extend(rows)

    def close(self) -> None:
        """End the thread after its current job; the rest is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            if self._jobs:
                self._jobs.popleft()()
            try:
                self._sample()
            except Exception as error:  # whatever a backend raises ends these rows, not the server
                log.exception("sampling failed")
                self._fail(f"sampling failed: {type(error).__name__}")

    def _wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._jobs or self._queue or self._running
            )
            return not self._closing

    def _sample(self) -> None:
        for number in [n for n, row in self._running.items() if row.cancelled]:
            self._rows.leave(number)
            self._finish(self._running.pop(number))
        while self._queue and self._rows.has_room(self._queue[0].prompt):
            row = self._queue.popleft()
            if row.cancelled:
                self._finish(row)
                continue
            number = next(self._numbers)
            self._running[number] = row
            self._rows.enter(number, row.prompt)
        for token in self._rows.step() if self._running else ():
            self._running[token.row].tokens.append(token)
            if token.finish:
                self._finish(self._running.pop(token.row))

    def _finish(self, row: Row) -> None:
        row.finished(row)

    def _fail(self, why: str) -> None:
        failed = [*self._running.values()]
        self._running.clear()
        self._rows.close()
        self._generator.close()
        for row in failed:
            row.failed = why
            self._finish(row)
