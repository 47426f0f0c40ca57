"""The endpoints: authentication, requests, results, errors.

Without an API key only requests to a loopback name are answered (`vox_core.api.serving`); there is
no CORS. Bodies are never logged. Telemetry of the SDK is accepted and dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

from vox_core.api.serving import is_loopback
from vox_core.errors import InputError
from vox_tinker.checkpoints import Record
from vox_tinker.futures import Answer, Refused, in_short
from vox_tinker.sampling import Samplers
from vox_tinker.training import trains_head
from vox_tinker.wire import PROTO, read_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from vox_tinker.clients import Clients

POLL_SECONDS = 30.0
"""Time that a request for a result waits; the SDK gives up after 45 s."""
MAX_BODY = 64 << 20
"""The SDK cuts data into requests of 5 MB; a larger single datum is one of millions of tokens."""
LINK_SECONDS = 3600
_PREFIX = "/api/v1"
_Handler: TypeAlias = "Callable[[Request], Awaitable[Response]]"


class Guard:
    """Check the body's type, and the key, or the host's name where there is none."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := self._fault(scope)):
            await _error(refused)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _fault(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        if scope["path"].startswith("/files/"):  # a signed link
            return None
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind not in ("application/json", PROTO):
            # A web page can send other types to this address without asking.
            return Refused(f"Content-Type: send application/json or {PROTO}", 415)
        if self._key is None:
            if not is_loopback(headers.get("host", "")):
                return Refused("a server without an API key answers at localhost only", 403)
            return None
        given = headers.get("x-api-key", "").encode("latin-1")
        if not hmac.compare_digest(given, self._key.encode()):
            return Refused("the API key is missing or wrong; set TINKER_API_KEY", 401)
        return None


class Api:
    """The endpoints over what clients have made; a link for a download is of this process."""

    def __init__(self, clients: Clients, key: str | None) -> None:
        self._clients, self._sessions = clients, clients.sessions
        self._store, self._samplers = clients.store, Samplers(clients.sessions)
        self._secret = secrets.token_bytes(32)
        self.app: ASGIApp = Guard(self._routed(), key)

    def _routed(self) -> Starlette:
        run = _PREFIX + "/training_runs/{run}"
        checkpoint = run + "/checkpoints/{kind}/{name}"
        made, samplers = self._sessions, self._samplers
        posts: dict[str, _Handler] = {
            "forward_backward": self._submitted("forward_backward"),
            **{verb: self._submitted(verb) for verb in self._clients.verbs},
            "client/config": _json(types.ClientConfigRequest, self._config),
            "client/dynamic_config": _json(types.ClientConfigRequest, self._dynamic_config),
            "create_session": _json(types.CreateSessionRequest, made.create),
            "session_heartbeat": _json(types.SessionHeartbeatRequest, self._heartbeat),
            "telemetry": self._telemetry,
            "get_info": _json(types.GetInfoRequest, self._clients.info),
            "unload_model": _json(types.UnloadModelRequest, self._clients.unload),
            "create_sampling_session": _json(types.CreateSamplingSessionRequest, samplers.create),
            "asample": _json(types.SampleRequest, samplers.sample),
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "weights_info": _json(_TinkerPath, self._weights_info),
            "sessions/{id}/finish": self._finish,
        }
        gets: dict[str, _Handler] = {
            _PREFIX + "/healthz": _plain(lambda _: types.HealthResponse(status="ok")),
            _PREFIX + "/get_server_capabilities": _plain(lambda _: made.capabilities()),
            _PREFIX + "/samplers/{id}": _plain(lambda r: samplers.find(r.path_params["id"])),
            _PREFIX + "/sessions": _plain(self._list_sessions),
            _PREFIX + "/sessions/{id}": _plain(lambda r: made.describe(r.path_params["id"])),
            _PREFIX + "/training_runs": _plain(self._list_runs),
            _PREFIX + "/checkpoints": _plain(self._list_all),
            run: _plain(lambda r: self._run(self._store.record(r.path_params["run"]))),
            run + "/checkpoints": _plain(self._list),
            checkpoint + "/external_weights_urls": _plain(self._links),
            "/files/{run}/{name}/{file}": self._download,
        }
        posted = [
            Route(f"{_PREFIX}/{path}", each, methods=["POST"]) for path, each in posts.items()
        ]
        return Starlette(
            routes=[
                *posted,
                *(Route(path, each) for path, each in gets.items()),
                Route(checkpoint, self._delete, methods=["DELETE"]),
                Route(checkpoint + "/ttl", self._ttl, methods=["PUT"]),
            ],
            exception_handlers={
                Refused: _refusal,
                InputError: _refusal,
                HTTPException: _no_endpoint,
                Exception: _fault,
            },
        )

    def _submitted(self, verb: str) -> _Handler:
        async def endpoint(request: Request) -> Response:
            kind = request.headers.get("content-type", "")
            if verb == "forward_backward" and kind != PROTO:
                raise Refused(f"Content-Type: send {PROTO}, as tinker 0.38 does", 415)
            return _response(self._clients.submit(verb, await _body(request)))

        return endpoint

    # --- sessions and results ---------------------------------------------------------------------

    def _config(self, _: types.ClientConfigRequest) -> BaseModel:
        # pyqwest 0.12 may lose the cancellation of a request whose response arrives; the SDK then
        # waits for its heartbeat forever when a session is closed. Without it, the SDK uses httpx.
        return types.ClientConfigResponse(use_pyqwest_transport=False)

    def _dynamic_config(self, _: types.ClientConfigRequest) -> BaseModel:
        return types.ClientDynamicConfigResponse(sample_cancel_enabled=True)

    def _heartbeat(self, request: types.SessionHeartbeatRequest) -> BaseModel:
        self._sessions.beat(request.session_id)
        return types.SessionHeartbeatResponse()

    async def _finish(self, request: Request) -> Response:
        await _body(request)
        self._clients.finish(request.path_params["id"])
        return Response(status_code=204)

    async def _telemetry(self, request: Request) -> Response:
        await _body(request)
        return _response(types.TelemetryResponse(status="accepted"))

    async def _retrieve(self, request: Request) -> Response:
        asked = read_json(types.FutureRetrieveRequest, await _body(request))
        answer = await self._clients.retrieve(asked.request_id, POLL_SECONDS)
        if answer is None:  # status 408, which the SDK retries without a word to the user
            waiting = TryAgainResponse(request_id=asked.request_id, queue_state="active")
            return JSONResponse(waiting.model_dump(), 408)
        return _response(answer)

    async def _cancel(self, request: Request) -> Response:
        asked = read_json(types.FutureRetrieveRequest, await _body(request))
        self._samplers.cancel(asked.request_id)
        return Response(status_code=204)

    # --- what is saved ----------------------------------------------------------------------------

    def _weights_info(self, asked: _TinkerPath) -> BaseModel:
        record, _, _ = self._store.find(asked.tinker_path)
        served = self._sessions.served(record.base_model)
        return types.WeightsInfoResponse(
            base_model=record.base_model,
            is_lora=True,
            lora_rank=record.lora.rank,
            train_unembed=trains_head(served.base, record.lora),
            train_mlp=record.lora.train_mlp,
            train_attn=record.lora.train_attn,
        )

    def _list_sessions(self, request: Request) -> BaseModel:
        limit, offset = _page(request)
        return types.ListSessionsResponse(sessions=self._sessions.ids()[offset : offset + limit])

    def _list_runs(self, request: Request) -> BaseModel:
        limit, offset = _page(request)
        found = self._store.records()
        return types.TrainingRunsResponse(
            training_runs=[self._run(each) for each in found[offset : offset + limit]],
            cursor=types.Cursor(offset=offset, limit=limit, total_count=len(found)),
        )

    def _run(self, record: Record) -> types.TrainingRun:
        saved = self._store.checkpoints(record.model_id)
        last = {each.checkpoint_type: each for each in reversed(saved)}
        return types.TrainingRun(
            training_run_id=record.model_id,
            base_model=record.base_model,
            model_owner="vox",
            is_lora=True,
            lora_rank=record.lora.rank,
            last_request_time=max([record.created, *(each.time for each in saved)]),
            last_checkpoint=last.get("training"),
            last_sampler_checkpoint=last.get("sampler"),
            user_metadata=record.user_metadata,
        )

    def _list(self, request: Request) -> BaseModel:
        record = self._store.record(request.path_params["run"])
        return types.CheckpointsListResponse(checkpoints=self._store.checkpoints(record.model_id))

    def _list_all(self, request: Request) -> BaseModel:
        limit, offset = _page(request)
        found = [c for r in self._store.records() for c in self._store.checkpoints(r.model_id)]
        found.sort(key=lambda each: each.time, reverse=True)
        return types.CheckpointsListResponse(
            checkpoints=found[offset : offset + limit],
            cursor=types.Cursor(offset=offset, limit=limit, total_count=len(found)),
        )

    async def _delete(self, request: Request) -> Response:
        run, checkpoint_id = _checkpoint(request)
        await asyncio.to_thread(self._store.delete, run, checkpoint_id)
        return Response(status_code=204)

    async def _ttl(self, request: Request) -> Response:
        asked = read_json(_Ttl, await _body(request))
        self._store.expire(*_checkpoint(request), asked.ttl_seconds)
        return Response(status_code=204)

    def _links(self, request: Request) -> BaseModel:
        run, checkpoint_id = _checkpoint(request)
        _, kind, folder = self._store.find(f"tinker://{run}/{checkpoint_id}")
        if kind != "external_weights":
            raise Refused("only weights of save_weights_external are downloaded; save them so")
        expires = int(time.time()) + LINK_SECONDS
        urls = {}
        for file in self._store.files(folder):
            place = f"{run}/{folder.name}/{file.name}"
            signed = f"?expires={expires}&signature={self._signature(place, expires)}"
            urls[file.name] = f"{request.base_url}files/{quote(place)}{signed}"
        return types.ExternalWeightsUrlsResponse(
            urls=urls, expires=datetime.fromtimestamp(expires, UTC)
        )

    async def _download(self, request: Request) -> Response:
        run, name, file = (request.path_params[each] for each in ("run", "name", "file"))
        expires, given = (request.query_params.get(each, "") for each in ("expires", "signature"))
        right = self._signature(f"{run}/{name}/{file}", expires)
        if not hmac.compare_digest(given.encode(), right.encode()) or int(expires) < time.time():
            raise Refused("the link is wrong or has expired; ask for it again", 403)
        _, _, folder = self._store.find(f"tinker://{run}/external_weights/{name}")
        if file not in {each.name for each in self._store.files(folder)}:
            raise Refused(f"there is no file {file!r}", 404)
        return FileResponse(folder / file)

    def _signature(self, place: str, expires: object) -> str:
        return hmac.new(self._secret, f"{place} {expires}".encode(), hashlib.sha256).hexdigest()


class _TinkerPath(BaseModel):
    tinker_path: str


class _Ttl(BaseModel):
    ttl_seconds: int | None = None


def _checkpoint(request: Request) -> tuple[str, str]:
    found = request.path_params
    return found["run"], f"{found['kind']}/{found['name']}"


def _page(request: Request) -> tuple[int, int]:
    try:
        limit = int(request.query_params.get("limit", 100))
        offset = int(request.query_params.get("offset", 0))
    except ValueError as error:
        raise Refused("limit and offset must be numbers") from error
    if not (1 <= limit <= 1000 and offset >= 0):
        raise Refused("limit must be 1 to 1000, and offset 0 or more")
    return limit, offset


async def _body(request: Request) -> bytes:
    """Read a body (413 if it is too large)."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise Refused(f"the body has more than {MAX_BODY:,} bytes; send fewer data", 413)
    except ClientDisconnect:
        raise Refused("the client went away", 499) from None
    return bytes(body)


def _json(kind: type[Any], handle: Callable[[Any], BaseModel]) -> _Handler:
    async def endpoint(request: Request) -> Response:
        return _response(handle(read_json(kind, await _body(request))))

    return endpoint


def _plain(handle: Callable[[Request], BaseModel]) -> _Handler:
    async def endpoint(request: Request) -> Response:
        return _response(await asyncio.to_thread(handle, request))

    return endpoint


def _response(found: Answer | BaseModel) -> Response:
    answer = found if isinstance(found, Answer) else Answer.of(found)
    return Response(answer.content, media_type=answer.media_type)


def _error(error: Refused) -> Response:
    return JSONResponse({"error": str(error), "category": "user"}, error.status)


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused | InputError)
    return _error(Refused(in_short(error)) if isinstance(error, InputError) else error)


async def _no_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path} is not supported by vox tinker serve"
    return JSONResponse({"error": text, "category": "user"}, error.status_code)


async def _fault(_: Request, error: Exception) -> Response:
    """Answer a request that raised anything else, without details, which uvicorn logs."""
    text = "internal error; the server's log has the details"
    return JSONResponse({"error": text, "category": "server"}, 500)
