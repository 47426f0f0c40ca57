"""The answers to one request while they are generated: collected, or streamed as they come.

Pieces arrive from the engine's thread. Whatever ends the request, its client's going away included,
cancels the answers that have not ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.responses import StreamingResponse

from vox_core.api.generating import AnswerText, Sampling
from vox_serve.engine import Answer, Engine, EngineFailed, Piece, QueueFull
from vox_serve.grammar import GuidedText
from vox_serve.guard import json_response, queue_full, unavailable, unless_gone
from vox_serve.responses import Form, event, joined

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send


class Running:
    """The answers to one request.

    Args:
        prompt_tokens: of all prompts together.
        counts: those of `/metrics`.
    """

    def __init__(
        self, engine: Engine, form: Form, prompt_tokens: int, counts: Counter[str]
    ) -> None:
        self._engine, self._form = engine, form
        self._prompt_tokens, self._counts = prompt_tokens, counts
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Queue[tuple[int, Piece | EngineFailed]]()
        self._answers: list[Answer] = []

    def add(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        adapter: str | None,
        text: AnswerText,
        top: int | None,
    ) -> None:
        """Append an answer; each has random numbers of its own."""
        index = len(self._answers)
        own, emit = replace(sampling, row=index), self._emitter(index)
        allowed = text.allowed if isinstance(text, GuidedText) else None
        self._answers.append(Answer(tokens, own, adapter, text, emit, top, allowed))

    def submit(self) -> None:
        """Queue the answers.

        Raises:
            ApiError: 429, the queue is full; 503, nothing is generated any more.
        """
        try:
            self._engine.submit(self._answers)
        except QueueFull as error:
            raise queue_full(self._engine.waiting) from error
        except EngineFailed as error:
            raise unavailable(error) from error
        self._counts["vox_prompt_tokens_total"] += self._prompt_tokens

    def streamed(self) -> Response:
        """Return a response of server-sent events."""
        ended = AsyncExitStack()
        ended.callback(self._cancel)
        return Events(self._events(), ended)

    async def whole(self, request: Request) -> Response:
        """Answer when all is generated; stop when the client goes away."""
        try:
            answers = await unless_gone(request, self._collect())
        except EngineFailed as error:
            raise unavailable(error) from error
        finally:
            self._cancel()
        count = self._count(answers)
        return json_response(self._form.completion(answers, self._prompt_tokens, count))

    def _cancel(self) -> None:
        """Stop generating what has not ended."""
        self._engine.cancel(self._answers)

    async def _events(self) -> AsyncIterator[bytes]:
        generated = 0
        for index in range(len(self._answers)):
            for each in self._form.opening(index):
                yield each
        try:
            async for index, piece in self._pieces():
                generated += self._count([piece])
                for each in self._form.piece(index, piece):
                    yield each
        except EngineFailed as error:
            yield event(unavailable(error).body)
            return
        for each in self._form.closing(self._prompt_tokens, generated):
            yield each

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield index and piece until every answer has ended.

        Raises:
            EngineFailed: an answer cannot be finished.
        """
        ended = 0
        while ended < len(self._answers):
            await asyncio.sleep(0)  # a fast stream lets other connections have their turn
            index, piece = await self._arrived.get()
            if isinstance(piece, EngineFailed):
                raise piece
            yield index, piece
            ended += piece.finish is not None

    async def _collect(self) -> list[Piece]:
        """Return every answer whole."""
        found: list[list[Piece]] = [[] for _ in self._answers]
        async for index, piece in self._pieces():
            found[index].append(piece)
        return [joined(each) for each in found]

    def _count(self, pieces: Sequence[Piece]) -> int:
        count = sum(len(piece.tokens) for piece in pieces)
        self._counts["vox_completion_tokens_total"] += count
        return count

    def _emitter(self, index: int) -> Callable[[Piece | EngineFailed], None]:
        def emit(piece: Piece | EngineFailed) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody reads it
                self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, piece))

        return emit


class Events(StreamingResponse):
    """Server-sent events; `ended` is unwound when the response has ended, however it did."""

    def __init__(self, events: AsyncIterator[bytes], ended: AsyncExitStack) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._ended:
            await super().__call__(scope, receive, send)
