"""The endpoints over a program that generates in place of vox, and its verification.

A request is checked, limited and counted as with vox's own engine (`app.py`); then it goes to the
program with the model that it names, and the answer comes back as the program gives it. Plain
prompts are sent as token ids. Before the first request, and again after each restart of the
program, its log-probabilities must be those of training, and it must render and tokenise
conversations as vox does.

Shape legend: T tokens of a text.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx2
import numpy as np

from vox_core.api.files import read_json
from vox_core.api.models import positions
from vox_core.contract import Batch, DType, Floats, Model, Notice
from vox_core.errors import BackendError, ConfigError
from vox_engines.keeper import URL, Keeper, Process
from vox_engines.programs import Program, find
from vox_serve.app import Api, Limits
from vox_serve.guard import json_response, queue_full, unavailable, unless_gone
from vox_serve.requests import ApiError, ChatRequest
from vox_serve.responses import DONE, event
from vox_serve.running import Events
from vox_serve.served import PROBE, Proof, prove

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from vox_core.api.models import Observe
    from vox_serve.app import Guide
    from vox_serve.engine import Engine
    from vox_serve.requests import CompletionRequest
    from vox_serve.responses import Form
    from vox_serve.served import Selection, Served
    from vox_serve.settings import ServeSettings

FAILED = "the program ended, or failed"
NOISE: dict[DType, float] = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.02}
"""Nats. A program batches and caches as it likes, so that one log-probability computed twice may
differ by so much. Chosen, not measured: benchmarks/engines.py prints the distances."""
LONGEST_SOCKET = 103
"""Bytes of a Unix socket's path: macOS' limit; Linux has 107."""
_CONVERSATION = (("user", PROBE), ("assistant", "42. Köln!"), ("user", "  and then?\n"))
_FORWARDED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "logit_bias", "n", "stop", "stream", "logprobs",
)  # fmt: skip
_ELSEWHERE = {
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "seed", "stream_options",
    "top_logprobs", "parallel_tool_calls", "tool_choice",
}  # fmt: skip
"""Fields of a request that are sent in another form, or mean nothing without tools."""


@contextmanager
def opened(
    chosen: Selection,
    served: Mapping[str, Served],
    settings: ServeSettings,
    key: str | None,
    observe: Observe,
) -> Iterator[tuple[Proxy, Mapping[str, Proof | None], int]]:
    """Start a program and verify it; end it after the block.

    Returns:
        The endpoints, how each adapter was verified, and answers that may be generated or wait.

    Raises:
        InputError: it cannot serve the models, or does not start.
        ProofError: V004 or V002, of an adapter.
    """
    program = _found(settings, chosen)
    dtype = chosen.source.trained_in or "bf16" if settings.dtype == "auto" else settings.dtype
    rows = settings.max_batch or program.rows
    reads = positions(read_json(chosen.source.base.path / "config.json"))
    secret, proofs = secrets.token_urlsafe(), dict[str, Proof | None]()
    with tempfile.TemporaryDirectory(prefix="vox-serve-") as scratch:  # only this user can open it
        socket = _socket(Path(scratch))
        command = [*program.command, *program.prepared(chosen, served, dtype, Path(scratch))]
        command += [program.rows_option, str(rows), *shlex.split(settings.engine_args)]
        observe(Notice(f"starting {program.title} in {dtype}"))

        def start() -> Process:
            started = [*command, *program.listening(socket)]
            environment = {program.key_variable: secret}
            return Process(program.name, started, environment, socket, secret)

        def verify(running: Process) -> None:
            scores = cast("Model", _Scores(running, program, served))
            for name, each in served.items():
                _require_same_prompts(running, program, each)
                probe = chosen.probes.get(name)
                proofs[name] = (
                    prove(scores, each, probe, dtype, reads, NOISE[dtype]) if each.adapter else None
                )

        with closing(Keeper(start, verify)) as keeper:
            gate = _Gate(program.name, keeper, rows, settings.queue)
            limits = Limits(settings.max_tokens, reads)
            client = httpx2.AsyncClient(
                base_url=URL,
                headers={"Authorization": f"Bearer {secret}"},
                timeout=httpx2.Timeout(None, connect=5.0),
                transport=httpx2.AsyncHTTPTransport(
                    uds=str(socket), limits=httpx2.Limits(max_connections=None)
                ),
            )
            yield Proxy(program, gate, client, served, limits, key), proofs, rows + settings.queue


def _socket(scratch: Path) -> Path:
    """Return the path of the program's socket.

    Raises:
        ConfigError: C002, the system allows no socket with so long a path.
    """
    path = scratch / "engine.sock"
    if (length := len(os.fsencode(path))) > LONGEST_SOCKET:
        raise ConfigError(
            "C002",
            "the folder for temporary files has too long a path for a Unix socket",
            where="TMPDIR",
            found=f"{path}, {length} bytes",
            expected=f"at most {LONGEST_SOCKET} bytes",
            remedy="set TMPDIR to a folder with a shorter path",
        )
    return path


def _found(settings: ServeSettings, chosen: Selection) -> Program:
    """Find the program of the settings, and check that it can serve the models."""
    program = find(settings.engine, settings.engine_python)
    flag = None
    if settings.backend:
        flag, remedy = "--backend", "leave out --backend: the engine computes by itself"
    elif (quant := settings.quant or chosen.source.quant) != "none":
        flag = "--quant"
        remedy = f"the base would be in {quant}; --quant none serves the adapters on it as stored"
    if flag:
        what = "an engine of another program does not have this"
        raise ConfigError("C004", what, where=f"--engine and {flag}", remedy=remedy)
    program.require(chosen)
    return program


# --- verification ---------------------------------------------------------------------------------


class _Scores:
    """The program's log-probabilities, as those of a model of the seam."""

    def __init__(self, running: Process, program: Program, served: Mapping[str, Served]) -> None:
        self._running, self._program = running, program
        self._models = {each.adapter: each for each in served.values()}

    def log_probs(self, batch: Batch, adapter: str | None = None) -> Floats:
        """Return the log-probability of each token but the first of one text, float32 (T,)."""
        tokens = batch.tokens_T.tolist()
        found = self._program.log_probs(self._running.post, self._models[adapter], tokens)
        return np.array([*found, 0.0], np.float32)


def _require_same_prompts(running: Process, program: Program, model: Served) -> None:
    """Check that the program renders and tokenises a conversation as vox does.

    Raises:
        BackendError: B004, it does not.
    """
    if model.template is None:
        return
    messages = [{"role": role, "content": content} for role, content in _CONVERSATION]
    ours, theirs = model.render(messages), program.rendered(running.post, model, messages)
    if ours == theirs:
        return
    at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    apart = min(len(ours), len(theirs)) if at is None else at
    raise BackendError(
        "B004",
        f"{program.name} renders or tokenises conversations otherwise than in training",
        where=f"the model {model.name}",
        found=f"{len(theirs)} tokens, from token {apart} on {theirs[apart : apart + 8]}",
        expected=f"{len(ours)} tokens, there {ours[apart : apart + 8]}",
        remedy="serve it with vox's own engine, and report this",
    )


# --- requests -------------------------------------------------------------------------------------


class _Gate:
    """Counts the answers that the program generates or that wait for it; takes the place of vox's
    engine in `Api`."""

    def __init__(self, name: str, keeper: Keeper, rows: int, queue: int) -> None:
        self._name = name
        self.max_batch, self._queue, self.keeper = rows, queue, keeper
        self._inside = 0

    @property
    def failed(self) -> str:
        """Why nothing is generated at present; empty while answers are."""
        return "" if self.keeper.running else f"{self._name} is starting again"

    @property
    def running(self) -> int:
        """Answers that the program generates."""
        return min(self._inside, self.max_batch)

    @property
    def waiting(self) -> int:
        """Answers that wait."""
        return self._inside - self.running

    def enter(self, answers: int) -> None:
        """Let answers in.

        Raises:
            ApiError: 429, there is no room.
        """
        if self._inside + answers > self.max_batch + self._queue:
            raise queue_full(self.waiting)
        self._inside += answers

    def leave(self, answers: int) -> None:
        """Let answers out."""
        self._inside -= answers


class Proxy(Api):
    """The endpoints, over a program.

    Args:
        client: of the program.
        key: see `Api`.
    """

    def __init__(
        self,
        program: Program,
        gate: _Gate,
        client: httpx2.AsyncClient,
        models: Mapping[str, Served],
        limits: Limits,
        key: str | None,
    ) -> None:
        super().__init__(cast("Engine", gate), models, limits, key, lifespan=self._lifespan)
        self._program, self._gate, self._client = program, gate, client

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Close the connections to the program before the event loop."""
        async with self._client:
            yield

    async def _respond(self, request: Request) -> Response:
        what = f"/v1/responses is not there with --engine {self._program.name}"
        raise ApiError(404, f"{what}; use /v1/chat/completions")

    async def _answer(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        model: Served,
        form: Form,
        prompts: Sequence[Sequence[int]],
        guide: Guide,
    ) -> Response:
        body, top = self._body(asked, model, prompts), asked.top or 0
        answers = len(prompts) * asked.n
        self._gate.enter(answers)
        async with AsyncExitStack() as ended:
            ended.callback(self._gate.leave, answers)
            response = await unless_gone(request, self._send(request.url.path, body))
            ended.push_async_callback(response.aclose)
            if asked.stream:
                events = _events(response, model, self._program, top)
                return Events(events, ended.pop_all())
            document = await unless_gone(request, _document(response))
        return json_response({**self._program.answered(document, top, {}), "model": model.name})

    def _body(
        self,
        asked: ChatRequest | CompletionRequest,
        model: Served,
        prompts: Sequence[Sequence[int]],
    ) -> dict[str, Any]:
        """Return the request to the program.

        Raises:
            ApiError: 400, a field is not for it, or the prompt does not fit.
        """
        self._require_room(len(prompts) * asked.n)
        most = min(self._sampling(asked, model, tokens).max_tokens for tokens in prompts)
        given = asked.model_dump(exclude_defaults=True).keys()
        differing, least = self._program.differing, self._program.least_top
        if strange := sorted((given - {*_FORWARDED} - _ELSEWHERE) | (given & differing.keys())):
            what = f"{strange[0]} is not supported with --engine {self._program.name}"
            what += f": {differing[strange[0]]}" if strange[0] in differing else ""
            raise ApiError(400, what, param=strange[0], code="unsupported_parameter")
        body = asked.model_dump(include={*_FORWARDED}, exclude_none=True)
        body["max_tokens"] = most
        if isinstance(asked, ChatRequest):
            body["messages"] = [message.rendered for message in asked.messages]
            field = "top_logprobs"
        else:
            body["prompt"] = prompts[0] if len(prompts) == 1 else prompts
            field = "logprobs"
        if asked.top is not None:
            body[field] = max(asked.top, least)
        if asked.seed is not None:
            body["seed"] = asked.seed % 2**31
        if asked.stream:
            body["stream_options"] = {"include_usage": asked.stream_options.include_usage}
        longest = most + max(map(len, prompts))
        body = self._program.translated(body, longest)
        return {"model": model.name, **body, **self._program.addressed(model)}

    async def _send(self, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        """Send a request; return the response, whose body has not been read.

        Raises:
            ApiError: the program refuses it, or there is none.
        """
        if self._gate.failed:
            raise unavailable(self._gate.failed)
        request = self._client.build_request("POST", path, json=body)
        try:
            response = await self._client.send(request, stream=True)
            if response.is_error:
                raise _refused(response.status_code, await response.aread(), self._program.name)
        except httpx2.HTTPError as error:
            raise unavailable(f"{self._program.name} ended") from error
        return response


async def _events(
    response: httpx2.Response, model: Served, program: Program, top: int
) -> AsyncIterator[bytes]:
    """Yield the program's server-sent events, under the model's name."""
    offsets = dict[int, int]()
    try:
        async for line in response.aiter_lines():
            field, _, value = line.partition(":")
            if field != "data":
                continue
            if value.strip() == "[DONE]":
                yield DONE
                return
            document = json.loads(value)
            if "error" in document:
                raise ValueError(document["error"])
            yield event({**program.answered(document, top, offsets), "model": model.name})
    except (httpx2.HTTPError, ValueError):
        yield event(unavailable(FAILED).body)


async def _document(response: httpx2.Response) -> dict[str, Any]:
    try:
        return dict(json.loads(await response.aread()))
    except (httpx2.HTTPError, ValueError) as error:
        raise unavailable(FAILED) from error


def _refused(status: int, body: bytes, name: str) -> ApiError:
    """Return a program's error in OpenAI's form; its own faults are no fault of the request."""
    try:
        error = json.loads(body)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, TypeError, KeyError, AttributeError):
        message, param = "no reason given", None
    if status in (400, 404, 413, 422, 429):
        return ApiError(400 if status != 429 else 429, f"{name}: {message}", param=param)
    return unavailable(f"{name} failed")
