"""The thread that computes on one base: jobs in their order, and sampling between them.

Each round runs one job and then one decoding step of the running batch, so that training and
sampling go on side by side. Passes of several training clients that wait at the same time are one
job, which the trainer may compute together. Nothing else may use the trainer.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vox_core.errors import VoxError

if TYPE_CHECKING:
    from vox_core.api.generating import Generator as Rows
    from vox_core.api.generating import Prompt, Token
    from vox_core.api.training import TrainingBase
    from vox_core.contract import Batch, Floats, Weigh

Call: TypeAlias = "tuple[Batch, int, str, Weigh | None]"
"""Arguments of `Trainer.accumulate`."""
Steps: TypeAlias = "Generator[Call, Floats, None]"
"""Yields calls of `Trainer.accumulate`, and is sent their log-probabilities; must not raise."""
LINGER_SECONDS = 0.02
"""Time that a pass waits for those of the clients that it was computed with before, whose next
requests may be on their way."""
log = logging.getLogger("vox_tinker")


class Job(NamedTuple):
    """Work of the engine's thread.

    Args:
        run: answers its client with its errors.
        owner: jobs of one owner are run in their order.
        joins: steps of several owners may be taken together.
    """

    run: Callable[[], Steps | None]
    owner: str
    joins: bool


@dataclass(slots=True, eq=False)
class Row:
    """A sequence to sample.

    Args:
        finished: called on the engine's thread once it has ended, failed or been cancelled.
        tokens: those sampled so far.
    """

    prompt: Prompt
    finished: Callable[[], None]
    tokens: list[Token] = field(default_factory=list)
    failed: str = ""
    cancelled: bool = False


class Engine:
    """Computes until it is closed."""

    def __init__(self, base: TrainingBase) -> None:
        generator: Rows = base.generator
        self._trainer, self._most = base.trainer, base.plan.micro_batch_tokens
        self._rows, self._numbers = generator.rows(log_probs=True), itertools.count()
        self._generator = generator
        self._jobs: deque[Job] = deque()
        self._joined: set[str] = set()
        self._queue: deque[Row] = deque()
        self._running: dict[int, Row] = {}
        self._changed, self._closing = Condition(), False
        context = copy_context()  # which settings file `--config` names
        self._thread = Thread(
            target=context.run, args=(self._run,), name="vox-tinker-engine", daemon=True
        )
        self._thread.start()

    def run(self, job: Callable[[], Steps | None], owner: str = "", *, joins: bool = False) -> None:
        """Queue a job."""
        with self._changed:
            self._jobs.append(Job(job, owner, joins))
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
                self._accumulate([_started(job) for job in self._next()])
            try:
                self._sample()
            except Exception as error:  # whatever a backend raises ends these rows, not the server
                log.exception("sampling failed")
                self._fail(_failure(error))

    def _wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._jobs or self._queue or self._running
            )
            return not self._closing

    def _next(self) -> list[Job]:
        """Take the first job; if it joins others, also theirs up to one that joins it."""
        with self._changed:
            found, seen = [self._jobs.popleft()], {""}
            if found[0].joins:
                seen.add(found[0].owner)
                self._changed.wait_for(
                    lambda: self._joined <= seen | {each.owner for each in self._jobs},
                    LINGER_SECONDS,
                )
                for job in [each for each in self._jobs if each.owner not in seen]:
                    if job.owner not in seen:
                        self._jobs.remove(job)
                        found.append(job)
                    if job.joins:
                        seen.add(job.owner)
                self._joined = seen - {""}
            return found

    def _accumulate(self, started: Sequence[Steps | None]) -> None:
        """Take all steps to their ends, those of several owners together where they fit into a
        micro-batch."""
        calls = {each: next(each, None) for each in started if each is not None}
        while waiting := {each: call for each, call in calls.items() if call}:
            chosen, tokens = list[Steps](), 0
            for each, (batch, *_) in waiting.items():
                tokens += len(batch.tokens_T)
                if chosen and tokens > self._most:
                    break
                chosen.append(each)
            try:
                found = self._trainer.accumulate_all([waiting[each] for each in chosen])
            except Exception as error:  # noqa: BLE001 - each answers its client with it
                for each in chosen:
                    calls[each] = _resumed(each.throw, error)
            else:
                for each, log_probs_T in zip(chosen, found, strict=True):
                    calls[each] = _resumed(each.send, log_probs_T)

    def _sample(self) -> None:
        for number in [n for n, row in self._running.items() if row.cancelled]:
            self._rows.leave(number)
            self._running.pop(number).finished()
        later = list[Row]()
        try:
            while self._queue and self._rows.has_room(self._queue[0].prompt):
                row = self._queue.popleft()
                if row.cancelled:
                    row.finished()
                elif self._rows.worth_waiting(row.prompt):
                    later.append(row)
                else:
                    number = next(self._numbers)
                    self._running[number] = row
                    self._rows.enter(number, row.prompt)
        finally:
            self._queue.extendleft(reversed(later))
        for token in self._rows.step() if self._running else ():
            row = self._running[token.row]
            if token.error:
                row.failed = _failure(token.error)
            else:
                row.tokens.append(token)
            if token.finish or token.error:
                self._running.pop(token.row).finished()

    def _fail(self, why: str) -> None:
        failed = [*self._running.values()]
        self._running.clear()
        try:
            self._rows.close()
            self._generator.close()
        except Exception:
            log.exception("the model cannot drop its rows")
        for row in failed:
            row.failed = why
            row.finished()


def _failure(error: Exception) -> str:
    return f"sampling failed: {error.what if isinstance(error, VoxError) else type(error).__name__}"


def _started(job: Job) -> Steps | None:
    """Run a job; one that fails without an answer ends alone."""
    try:
        return job.run()
    except Exception:
        log.exception("a job failed")
        return None


def _resumed(resume: Callable[[Any], Call], given: object) -> Call | None:
    """Return the next call of some steps; None at their end."""
    try:
        return resume(given)
    except StopIteration:
        return None
