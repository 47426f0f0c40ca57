"""Authentication, request bodies and error responses, shared by every endpoint.

Without an API key only requests to a loopback name are answered (`vox_core.api.serving`); there is
no CORS. Bodies are JSON by their content type, and never logged.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from vox_core.api.serving import is_loopback
from vox_serve.requests import MAX_BODY, ApiError
from vox_serve.responses import encoded

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEYLESS = {"/", "/health"}
"""Paths that need no key; no secret is in what they answer."""
BODY_SECONDS = 60.0
"""Time for a client to send its body."""
CLIENT_GONE = 499
RETRY_AFTER = 1
"""Seconds, for a client that is refused now and not for good."""
_JSON = "application/json"
Result = TypeVar("Result")


class Guard:
    """Check the key, or the host's name where there is none; count the answers by status."""

    def __init__(self, app: ASGIApp, key: str | None, counts: Counter[str]) -> None:
        self._app, self._counts = app, counts
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts[f'vox_requests_total{{status="{message["status"]}"}}'] += 1
            await send(message)

        try:
            self._require_allowed(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, counting)
        else:
            try:
                await self._app(scope, receive, counting)
            except Exception:  # answered outside of this middleware
                self._counts['vox_requests_total{status="500"}'] += 1
                raise

    def _require_allowed(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._key is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
            if (scheme.lower() != "bearer" or not same) and scope["path"] not in KEYLESS:
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                )
        elif not is_loopback(host := headers.get("host", "")):
            raise ApiError(
                403,
                f"a server without an API key answers at localhost only, not at {host[:80]!r}",
            )


async def read_body(request: Request) -> bytes:
    """Read the body.

    Raises:
        ApiError: 415, it is no JSON by its type; 413, it is too large; 408, it does not come.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise ApiError(415, f"the body must be JSON: send `Content-Type: {_JSON}`")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise ApiError(413, f"the body has more than {MAX_BODY:,} bytes; shorten it")
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "the client went away") from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    return bytes(body)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; cancel it when the client goes away.

    Raises:
        ApiError: the client went away.
    """
    gone, working = asyncio.create_task(_client_gone(request)), asyncio.create_task(work)
    try:
        await asyncio.wait({gone, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(CLIENT_GONE, "the client went away")
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def unavailable(why: object) -> ApiError:
    """Return the error of a request that cannot be answered now."""
    return ApiError(503, f"{why}; send the request again later", retry_after=RETRY_AFTER)


def queue_full(waiting: int) -> ApiError:
    """Return the error of a request that there is no room for."""
    what = f"{waiting} answers wait already; try again later"
    return ApiError(429, what, code="queue_full", retry_after=RETRY_AFTER)


def json_response(body: object, status: int = 200) -> Response:
    """Return a response with a JSON body."""
    return Response(encoded(body), status, media_type=_JSON)


def error_response(error: ApiError) -> Response:
    """Return the response of an error, with its headers."""
    response = json_response(error.body, error.status)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def refusal(request: Request, error: Exception) -> Response:
    """Answer a request that raised `ApiError`; an exception handler of Starlette."""
    assert isinstance(error, ApiError)
    return error_response(error)


async def fault(request: Request, error: Exception) -> Response:
    """Answer a request that raised anything else, without details; an exception handler."""
    return error_response(ApiError(500, "internal error; the server's log has the details"))
