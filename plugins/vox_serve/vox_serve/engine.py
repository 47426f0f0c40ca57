"""The engine: one thread that runs the model, and a bounded queue before it.

Continuous batching: before each decoding step, waiting answers enter the running batch while there
is room, in the order in which they came, and cancelled ones leave it. The batch itself, sampling
and the text of an answer are the core's.

An answer's pieces are delivered from the engine's thread; `emit` must return at once. Whatever else
uses the model, such as adding an adapter, is called between two steps.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from vox_core.api.generating import AnswerText, Generator, Prompt, Sampling, Token

if TYPE_CHECKING:
    from vox_core.api.generating import Finish
    from vox_core.contract import Bools

Result = TypeVar("Result")
log = logging.getLogger("vox_serve")


class QueueFull(Exception):
    """As many answers wait as may."""


class EngineFailed(Exception):
    """The model failed, or the server is closing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of an answer as it comes.

    Args:
        tokens: those since the last piece, without the one that ended the turn.
        finish: `stop` or `length` with the last piece.
    """

    text: str
    tokens: Sequence[Token]
    finish: Finish | None


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    unused: str | None
    result: Future[Any]


@dataclass(slots=True, eq=False)
class Answer:
    """An answer to generate.

    Args:
        emit: called with each piece, or with the error that ends the answer.
        allowed: see `Prompt`.
    """

    tokens: Sequence[int]
    sampling: Sampling
    adapter: str | None
    text: AnswerText
    emit: Callable[[Piece | EngineFailed], None]
    top: int | None = None
    allowed: Callable[[int], Bools | None] | None = None
    cancelled: bool = False
    broken: bool = False
    _held: list[Token] = field(default_factory=list)
    _counted: int = 0

    @property
    def prompt(self) -> Prompt:
        """The row of the running batch."""
        return Prompt(self.tokens, self.sampling, self._ended, self.adapter, self.top, self.allowed)

    def _ended(self, token: int) -> bool:
        try:
            return self.text.add(token)
        except Exception:  # of this answer alone
            log.exception("the text of an answer failed")
            self.broken = True
            return True

    def take(self, token: Token) -> None:
        """Emit the text that is ready after `token`, if any."""
        if self.broken:
            self.emit(EngineFailed("the answer cannot be decoded"))
            return
        if token.error:
            log.error("an answer of %s failed: %s", self.adapter or "the base", token.error)
            self.emit(EngineFailed(token.error.what))
            return
        if self.text.tokens > self._counted:  # the token that ends a turn does not count
            self._counted = self.text.tokens
            self._held.append(token)
        text = self.text.take(everything=token.finish is not None)
        if text or token.finish:
            piece, self._held = Piece(text, self._held, token.finish), []
            self.emit(piece)


class Engine:
    """Generates answers until it is closed.

    Args:
        generator: nothing else may use it.
        queue: maximum number of answers that wait beside those in the running batch.

    Attributes:
        failed: why nothing is generated any more; empty while answers are.
    """

    def __init__(self, generator: Generator, queue: int) -> None:
        self.max_batch, self._queue = generator.most_rows, queue
        self.failed = ""
        self._generator, self._calls = generator, list[_Call]()
        self._rows, self._numbers = generator.rows(), itertools.count()
        self._waiting: deque[Answer] = deque()
        self._running: dict[int, Answer] = {}
        self._changed, self._closing = Condition(), False
        context = copy_context()  # which settings file `--config` names
        self._thread = Thread(
            target=context.run, args=(self._run,), name="vox-serve-engine", daemon=True
        )
        self._thread.start()

    @property
    def running(self) -> int:
        """Answers in the running batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Answers in the queue."""
        return len(self._waiting)

    def submit(self, answers: Sequence[Answer]) -> None:
        """Queue all of `answers`, or none.

        Raises:
            QueueFull: there is no room for all of them.
            EngineFailed: nothing is generated any more.
        """
        with self._changed:
            if self._closing or self.failed:
                raise EngineFailed("the server is closing" if self._closing else self.failed)
            inside = len(self._running) + len(self._waiting)
            if inside + len(answers) > self.max_batch + self._queue:
                raise QueueFull
            self._waiting.extend(answers)
            self._changed.notify()

    def cancel(self, answers: Sequence[Answer]) -> None:
        """Drop answers that nobody reads any more; finished ones are ignored."""
        with self._changed:
            for answer in answers:
                answer.cancelled = True
                with suppress(ValueError):
                    self._waiting.remove(answer)
            self._changed.notify()

    def call(self, function: Callable[[], Result], unused: str | None = None) -> Result:
        """Run `function` on the engine's thread between two steps; return what it returns.

        Args:
            unused: name of an adapter; wait until no answer uses it.

        Raises:
            EngineFailed: the server is closing.
        """
        call = _Call(function, unused, Future[Result]())
        with self._changed:
            if self._closing:
                raise EngineFailed("the server is closing")
            self._calls.append(call)
            self._changed.notify()
        found: Result = call.result.result()
        return found

    def close(self) -> None:
        """End all answers with an error, and the thread after its current step."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._leave_cancelled()
                self._answer_calls()
                self._enter_waiting()
                for token in self._rows.step() if len(self._rows) else ():
                    self._take(token)
            except Exception:  # whatever a backend raises ends these answers, not the server
                log.exception("the model failed; its running answers end with an error")
                self._end_running()
        self._end_running()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._closing or self._waiting or self._running or self._calls):
                self._changed.wait()
            return not self._closing

    def _leave_cancelled(self) -> None:
        for number in [n for n, answer in self._running.items() if answer.cancelled]:
            del self._running[number]
            self._rows.leave(number)

    def _answer_calls(self) -> None:
        with self._changed:
            used = {answer.adapter for answer in (*self._running.values(), *self._waiting)}
            ready = [call for call in self._calls if call.unused is None or call.unused not in used]
            self._calls = [call for call in self._calls if call not in ready]
        for call in ready:
            try:
                call.result.set_result(call.function())
            except Exception as error:  # noqa: BLE001 - raised for the caller
                call.result.set_exception(error)

    def _enter_waiting(self) -> None:
        while self._waiting:
            with self._changed:
                if not self._waiting or not self._rows.has_room(self._waiting[0].prompt):
                    return
                number, answer = next(self._numbers), self._waiting.popleft()
                self._running[number] = answer
            try:
                self._rows.enter(number, answer.prompt)
            except Exception:
                log.exception("an answer cannot be generated")
                del self._running[number]
                answer.emit(EngineFailed("the answer cannot be generated"))

    def _take(self, token: Token) -> None:
        answer = self._running[token.row]
        if token.finish or token.error:
            del self._running[token.row]
        answer.take(token)

    def _end_running(self) -> None:
        """End the running answers, and the waiting ones if nothing can be generated any more."""
        try:
            self._rows.close()
            self._generator.close()
        except Exception:
            log.exception("the model cannot be used any more")
            self.failed = "the model failed; restart the server"
        with self._changed:
            ended = [*self._running.values()]
            self._running.clear()
            if self.failed or self._closing:
                ended += self._waiting
                self._waiting.clear()
            calls, self._calls = (self._calls, []) if self._closing else ([], self._calls)
        for call in calls:
            call.result.set_exception(EngineFailed("the server is closing"))
        for answer in ended:
            answer.emit(EngineFailed("the server is closing" if self._closing else "model failed"))
