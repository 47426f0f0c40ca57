"""Routes, streaming and metrics, on Starlette; an answer is cancelled when its client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from vox_core.api.generating import Sampling
from vox_core.errors import DataError
from vox_serve.engine import Answer, Engine, EngineFailed, Piece, QueueFull
from vox_serve.guard import (
    CLIENT_GONE,
    Guard,
    client_gone,
    error_response,
    fault,
    json_response,
    read_body,
    refusal,
)
from vox_serve.requests import ApiError, ChatRequest, CompletionRequest, parse
from vox_serve.responses import DONE, Chat, Form, Text, event, joined, usage
from vox_serve.served import Served

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

RETRY_AFTER = 1
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests.

    Args:
        max_tokens: of an answer.
        positions: tokens that the model can read; None: no limit.
    """

    max_tokens: int
    positions: int | None


class Api:
    """The endpoints.

    Args:
        models: by name.
        key: what requests must send as bearer token; None: nothing.
    """

    def __init__(
        self, engine: Engine, models: Mapping[str, Served], limits: Limits, key: str | None = None
    ) -> None:
        self._engine, self._models, self._limits = engine, models, limits
        self._created, self._counts = int(time.time()), Counter[str]()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._show_model),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ],
            middleware=[Middleware(Guard, key=key, counts=self._counts)],
            exception_handlers={
                ApiError: refusal,
                HTTPException: _refusal_of_http,
                Exception: fault,
            },
        )

    # --- models, health, metrics ------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        if self._engine.failed:
            raise ApiError(503, "the model failed; restart the server")
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        gauges = {
            "vox_answers_running": self._engine.running,
            "vox_answers_waiting": self._engine.waiting,
        }
        lines = [f"# TYPE {name} gauge\n{name} {value}" for name, value in gauges.items()]
        named = ""
        for sample, value in sorted(self._counts.items()):
            if (name := sample.partition("{")[0]) != named:
                lines.append(f"# TYPE {name} counter")
                named = name
            lines.append(f"{sample} {value}")
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _list_models(self, request: Request) -> Response:
        return json_response(
            {"object": "list", "data": [*map(self._described, self._models.values())]}
        )

    async def _show_model(self, request: Request) -> Response:
        return json_response(self._described(self._model(request.path_params["name"])))

    def _described(self, model: Served) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "vox",
            "parent": model.parent,
        }

    def _model(self, name: str) -> Served:
        if model := self._models.get(name):
            return model
        raise ApiError(
            404,
            f"there is no model {name[:80]!r}; there are: {', '.join(self._models)}",
            param="model",
            code="model_not_found",
        )

    # --- completions ------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        asked = await run_in_threadpool(parse, ChatRequest, await read_body(request))
        model = self._model(asked.model)
        if not model.has_template:
            raise ApiError(
                400,
                f"the model {model.name} has no chat template; use /v1/completions",
                param="model",
            )
        messages = [message.rendered for message in asked.messages]
        try:
            tokens = await run_in_threadpool(model.render, messages)
        except DataError as error:
            found = f"the chat template cannot render the conversation: {error.found}"
            raise ApiError(400, found, param="messages") from error
        form = Chat(model, logprobs=asked.top is not None)
        return await self._answer(request, asked, model, form, [tokens])

    async def _complete(self, request: Request) -> Response:
        asked = await run_in_threadpool(parse, CompletionRequest, await read_body(request))
        model = self._model(asked.model)
        prompts = []
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                prompts.append(await run_in_threadpool(model.encode, prompt))
            else:
                prompts.append(prompt)
        form = Text(model, logprobs=asked.top is not None)
        return await self._answer(request, asked, model, form, prompts)

    async def _answer(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        model: Served,
        form: Form,
        prompts: Sequence[Sequence[int]],
    ) -> Response:
        if len(prompts) * asked.n > self._engine.max_batch:
            raise ApiError(
                400,
                f"the request asks for {len(prompts) * asked.n} answers, and the server generates "
                f"{self._engine.max_batch} at once; send several requests",
                param="n",
            )
        samplings = [self._sampling(asked, model, tokens) for tokens in prompts]
        running = _Running(self._engine)
        for tokens, sampling in zip(prompts, samplings, strict=True):
            running.add(asked, model, tokens, sampling)
        running.submit()
        prompt_tokens = sum(map(len, prompts))
        self._counts["vox_prompt_tokens_total"] += prompt_tokens
        if asked.stream:
            with_usage = asked.stream_options.include_usage
            events = self._events(running, form, prompt_tokens, with_usage=with_usage)
            return _Events(events, running)
        return await self._whole(request, running, form, prompt_tokens)

    def _sampling(
        self, asked: ChatRequest | CompletionRequest, model: Served, tokens: Sequence[int]
    ) -> Sampling:
        """Check a prompt against the model, and the limits.

        Raises:
            ApiError: 400.
        """
        self._require_fit(asked, model, tokens)
        bias = {int(token): value for token, value in asked.logit_bias.items()}
        if wrong := [token for token in [*tokens, *bias] if token >= model.vocabulary]:
            found = f"token {wrong[0]} is outside the vocabulary of {model.vocabulary} tokens"
            param = "logit_bias" if wrong[0] in bias else "prompt"
            raise ApiError(400, found, param=param)
        room = asked.most or self._limits.max_tokens
        if self._limits.positions is not None:
            room = min(room, self._limits.positions - len(tokens))
        return Sampling(
            max_tokens=room,
            logit_bias=tuple(bias.items()),
            seed=secrets.randbits(63) if asked.seed is None else asked.seed % 2**63,
            **asked.model_dump(include=set(_SAMPLING)),
        )

    def _require_fit(
        self, asked: ChatRequest | CompletionRequest, model: Served, tokens: Sequence[int]
    ) -> None:
        if (asked.most or 0) > self._limits.max_tokens:
            raise ApiError(
                400,
                f"max_tokens is {asked.most}, and the server allows {self._limits.max_tokens}; "
                "ask for fewer, or start it with a larger --max-tokens",
                param="max_tokens",
            )
        if not tokens:
            raise ApiError(
                400, "the prompt is empty; send at least one token", param=asked.prompted
            )
        if self._limits.positions is not None and len(tokens) >= self._limits.positions:
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens, and {model.name} reads "
                f"{self._limits.positions}, prompt and answer together; shorten the prompt",
                param=asked.prompted,
                code="context_length_exceeded",
            )

    async def _whole(
        self, request: Request, running: _Running, form: Form, prompt_tokens: int
    ) -> Response:
        """Answer when all is generated; stop when the client goes away."""
        gone = asyncio.create_task(client_gone(request))
        collecting = asyncio.create_task(running.collect())
        try:
            await asyncio.wait({gone, collecting}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=CLIENT_GONE)
            answers = collecting.result()
        except EngineFailed as error:
            raise _failed(error) from error
        finally:
            gone.cancel()
            collecting.cancel()
            running.cancel()
        counts = usage(prompt_tokens, self._count(answers))
        return json_response(form.completion(answers, counts))

    async def _events(
        self, running: _Running, form: Form, prompt_tokens: int, *, with_usage: bool
    ) -> AsyncIterator[bytes]:
        generated = 0
        for index in range(running.count):
            if opening := form.opening(index):
                yield event(opening)
        try:
            async for index, piece in running.pieces():
                generated += self._count([piece])
                chunk = form.piece(index, piece)
                yield event({**chunk, "usage": None} if with_usage else chunk)
        except EngineFailed as error:
            yield event(_failed(error).body)
            return
        if with_usage:
            yield event(form.closing(usage(prompt_tokens, generated)))
        yield DONE

    def _count(self, pieces: Sequence[Piece]) -> int:
        count = sum(len(piece.tokens) for piece in pieces)
        self._counts["vox_completion_tokens_total"] += count
        return count


class _Running:
    """The answers to one request, whose pieces arrive from the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Queue[tuple[int, Piece | EngineFailed]]()
        self._answers: list[Answer] = []

    @property
    def count(self) -> int:
        """Number of answers."""
        return len(self._answers)

    def add(
        self,
        asked: ChatRequest | CompletionRequest,
        model: Served,
        tokens: Sequence[int],
        sampling: Sampling,
    ) -> None:
        """Prepare the `n` answers to one prompt; each has random numbers of its own."""
        for _ in range(asked.n):
            index = len(self._answers)
            own = replace(sampling, row=index)
            text, emit = model.text(asked.stop), self._emitter(index)
            self._answers.append(Answer(tokens, own, model.adapter, text, emit, asked.top))

    def submit(self) -> None:
        """Queue the answers.

        Raises:
            ApiError: 429, the queue is full; 503, nothing is generated any more.
        """
        try:
            self._engine.submit(self._answers)
        except QueueFull as error:
            raise ApiError(
                429,
                f"{self._engine.waiting} answers wait already; try again later",
                code="queue_full",
                retry_after=RETRY_AFTER,
            ) from error
        except EngineFailed as error:
            raise _failed(error) from error

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield index and piece until every answer has ended.

        Raises:
            EngineFailed: an answer cannot be finished.
        """
        ended = 0
        while ended < len(self._answers):
            index, piece = await self._arrived.get()
            if isinstance(piece, EngineFailed):
                raise piece
            yield index, piece
            ended += piece.finish is not None

    async def collect(self) -> list[Piece]:
        """Return every answer whole."""
        found: list[list[Piece]] = [[] for _ in self._answers]
        async for index, piece in self.pieces():
            found[index].append(piece)
        return [joined(each) for each in found]

    def cancel(self) -> None:
        """Stop generating what has not ended."""
        self._engine.cancel(self._answers)

    def _emitter(self, index: int) -> Callable[[Piece | EngineFailed], None]:
        def emit(piece: Piece | EngineFailed) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody reads it
                self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, piece))

        return emit


class _Events(StreamingResponse):
    """Server-sent events; whatever ends the response cancels the answers."""

    def __init__(self, events: AsyncIterator[bytes], running: _Running) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


def _failed(error: EngineFailed) -> ApiError:
    return ApiError(503, f"{error}; send the request again later", retry_after=RETRY_AFTER)


async def _refusal_of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    remedy = "GET /v1/models, /health and /metrics, POST /v1/chat/completions and /v1/completions"
    return error_response(
        ApiError(error.status_code, f"{error.detail}: {path}; there are {remedy}")
    )
