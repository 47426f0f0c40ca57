"""Routes and metrics, on Starlette: from a body to prompts, sampling and a form of answers."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route

from vox_core.api.generating import Sampling
from vox_core.api.rows import RenderError
from vox_core.errors import DataError
from vox_serve import page
from vox_serve.engine import Engine
from vox_serve.grammar import Constraint, GrammarFault
from vox_serve.guard import Guard, error_response, fault, json_response, read_body, refusal
from vox_serve.requests import ApiError, ChatRequest, CompletionRequest, TokenizeRequest, parse
from vox_serve.responses import Chat, Form, Text
from vox_serve.running import Running
from vox_serve.served import Served
from vox_serve.stateless import ResponsesRequest, Stateless, sent_as
from vox_serve.tools import FORMATS, Calls, Format

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from starlette.requests import Request

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


@dataclass(frozen=True, slots=True)
class Guide:
    """Grammar of an answer's text, and its parser.

    Args:
        matcher: its grammar.
        stops: texts that end it.
        format: of the calls of `functions`.
    """

    matcher: LLMatcher | None
    stops: Sequence[str]
    format: Format | None = None
    functions: Collection[str] = ()

    @property
    def calls(self) -> Callable[[], Calls] | None:
        """Make the reader of an answer's calls."""
        return partial(Calls, self.format, self.functions) if self.format else None


class Api:
    """The endpoints.

    Args:
        models: by name.
        key: what requests must send as bearer token; None: nothing.
        routes: of further endpoints.
        lifespan: holds what lives as long as the server's event loop.
    """

    def __init__(
        self,
        engine: Engine,
        models: Mapping[str, Served],
        limits: Limits,
        key: str | None = None,
        routes: Sequence[Route] = (),
        lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
    ) -> None:
        self._engine, self._models, self._limits = engine, models, limits
        self._created, self._counts = int(time.time()), Counter[str]()
        self.app = Starlette(
            routes=[
                Route("/", page.show),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._show_model),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/responses", self._respond, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/apply-template", self._apply_template, methods=["POST"]),
                *routes,
            ],
            middleware=[Middleware(Guard, key=key, counts=self._counts)],
            exception_handlers={
                ApiError: refusal,
                HTTPException: _refusal_of_http,
                Exception: fault,
            },
            lifespan=lifespan,
        )

    # --- models, health, metrics ------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        if self._engine.failed:
            raise ApiError(503, self._engine.failed)
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

    # --- prompts ----------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        asked = await run_in_threadpool(parse, TokenizeRequest, await read_body(request))
        model = self._model(asked.model or next(iter(self._models)))
        return await run_in_threadpool(self._tokenized, model, asked)

    def _tokenized(self, model: Served, asked: TokenizeRequest) -> Response:
        if asked.messages:
            text, special = _prompt(model, asked), False
        else:
            text, special = asked.prompt or "", asked.add_special_tokens is not False
        tokens = model.encode(text, special=special)
        found = {"count": len(tokens), "max_model_len": self._limits.positions, "tokens": tokens}
        pieces = [*map(model.decode, tokens)] if asked.return_token_strs else None
        return json_response({**found, "token_strs": pieces})

    async def _apply_template(self, request: Request) -> Response:
        asked = await run_in_threadpool(parse, TokenizeRequest, await read_body(request))
        if asked.messages is None:
            raise ApiError(400, "messages: Field required", param="messages")
        model = self._model(asked.model or next(iter(self._models)))
        text = await run_in_threadpool(_prompt, model, asked)
        tokens = await run_in_threadpool(model.encode, text, special=False)
        return json_response({"prompt": text, "tokens": tokens})

    # --- completions ------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        asked = await run_in_threadpool(parse, ChatRequest, await read_body(request))
        model = self._model(asked.model)
        tokens, guide = await run_in_threadpool(_prepared, model, asked)
        usage, logprobs = asked.stream_options.include_usage, asked.top is not None
        form = Chat(model, logprobs=logprobs, usage=usage, calls=guide.calls)
        return await self._answer(request, asked, model, form, [tokens], guide)

    async def _respond(self, request: Request) -> Response:
        asked = await run_in_threadpool(parse, ResponsesRequest, await read_body(request))
        model, chat = self._model(asked.model), asked.chat()
        try:
            tokens, guide = await run_in_threadpool(_prepared, model, chat)
            form = Stateless(model, asked, guide.calls)
            return await self._answer(request, chat, model, form, [tokens], guide)
        except ApiError as error:
            sent_as(error)
            raise

    async def _complete(self, request: Request) -> Response:
        asked = await run_in_threadpool(parse, CompletionRequest, await read_body(request))
        model = self._model(asked.model)
        prompts = [
            await run_in_threadpool(model.encode, each) if isinstance(each, str) else each
            for each in asked.prompts
        ]
        form = Text(model, logprobs=asked.top is not None, usage=asked.stream_options.include_usage)
        guide = Guide(await run_in_threadpool(_matcher, model, asked.constraint), asked.stop)
        return await self._answer(request, asked, model, form, prompts, guide)

    async def _answer(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        model: Served,
        form: Form,
        prompts: Sequence[Sequence[int]],
        guide: Guide,
    ) -> Response:
        self._require_room(len(prompts) * asked.n)
        samplings = [self._sampling(asked, model, tokens) for tokens in prompts]
        if self._models.get(model.name) is not model:  # removed while the prompt was rendered
            self._model(model.name)
            raise ApiError(503, f"{model.name} was replaced; send the request again", retry_after=1)
        running = Running(self._engine, form, sum(map(len, prompts)), self._counts)
        for tokens, sampling in zip(prompts, samplings, strict=True):
            for _ in range(asked.n):
                after = tokens if isinstance(form, Text) else ()
                calls = guide.format is not None
                text = model.text(guide.stops, after, guide.matcher, calls=calls)
                running.add(tokens, sampling, model.adapter, text, asked.top)
        running.submit()
        return running.streamed() if asked.stream else await running.whole(request)

    def _require_room(self, answers: int) -> None:
        if answers > self._engine.max_batch:
            raise ApiError(
                400,
                f"the request asks for {answers} answers, and the server generates "
                f"{self._engine.max_batch} at once; send several requests",
                param="n",
            )

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


def _prompt(model: Served, asked: ChatRequest | TokenizeRequest) -> str:
    """Render a conversation.

    Raises:
        ApiError: 400, the model's chat template cannot write it, or there is none.
    """
    if model.template is None:
        found = f"the model {model.name} has no chat template; use /v1/completions"
        raise ApiError(400, found, param="model")
    messages = [message.rendered for message in asked.messages or ()]
    tools = [] if isinstance(asked, ChatRequest) and asked.tool_choice == "none" else asked.tools
    generation = not isinstance(asked, TokenizeRequest) or asked.add_generation_prompt
    try:
        return model.prompt(messages, [*map(_shown, tools)], generation=generation)
    except (DataError, RenderError) as error:
        cause = error.found if isinstance(error, DataError) else error.__cause__ or error
        found = f"the chat template cannot render the conversation: {cause}"
        raise ApiError(400, found, param="messages") from error


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the template sees of a tool: `strict` is about the grammar."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _prepared(model: Served, asked: ChatRequest) -> tuple[list[int], Guide]:
    """Render a conversation, and compile what its answer must follow.

    Raises:
        ApiError: 400.
    """
    tokens = model.encode(_prompt(model, asked), special=False)
    if not asked.functions:
        return tokens, Guide(_matcher(model, asked.constraint), asked.stop)
    form, stops = _call_format(model), list(asked.stop)
    functions = list(asked.functions.values())
    words = asked.tool_choice == "auto"
    many = asked.parallel_tool_calls and asked.forced is None
    grammar = None
    if not words or any(function.get("strict") for function in functions):
        wanted = [asked.functions[asked.forced]] if asked.forced else functions
        lark = model.calls_grammar(form, wanted, many=many, words=words)
        grammar = _matcher(model, Constraint("tools", "lark", lark))
    elif not many and form.end:
        stops.append(form.end)  # the answer ends with its first call
    elif not many and form.joint:
        found = f"parallel_tool_calls = false needs tool_choice = required with {form.name}'s calls"
        raise ApiError(400, found, param="parallel_tool_calls")
    return tokens, Guide(grammar, stops, form, asked.functions)


def _call_format(model: Served) -> Format:
    """Return the format of a model's calls.

    Raises:
        ApiError: 400, there is none, or one that is not known.
    """
    known = ", ".join(form.name for form in FORMATS)
    found = f"writes tool calls in none of the formats that vox reads: {known}"
    try:
        if form := model.call_format:
            return form
    except RenderError as error:
        found = f"has no tool calls: {error.__cause__ or error}"
    found = f"the chat template of {model.name} {found}"
    raise ApiError(400, found, param="tools", code="unsupported_parameter")


def _matcher(model: Served, constraint: Constraint | None) -> LLMatcher | None:
    """Compile what an answer must follow.

    Raises:
        ApiError: 400, it cannot be followed.
    """
    try:
        return None if constraint is None else model.matcher(constraint)
    except GrammarFault as fault:
        found = f"{constraint.param if constraint else ''} cannot be followed: {fault}"
        raise ApiError(400, found, param=constraint.param if constraint else None) from fault


async def _refusal_of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    there = ", ".join(route.path for route in request.app.routes)
    found = f"{error.detail}: {request.method} {request.url.path[:80]}; there are: {there}"
    return error_response(ApiError(error.status_code, found))
