"""Results of requests by id, retrieved by long polling.

A client that loses its connection retrieves again, so a result is kept after it was retrieved: the
last `KEPT` finished ones. Everything here runs on the event loop's thread, but `resolve_soon`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinker import types

from vox_core.errors import InputError, VoxError

if TYPE_CHECKING:
    from pydantic import BaseModel

KEPT = 4096
DIGITS = re.compile(r"[0-9]{1,18}")
"""A number within the id of a request or sampler, which SQLite can compare."""
log = logging.getLogger("vox_tinker")


class Refused(Exception):
    """A request that cannot be carried out, in words for the user.

    Args:
        status: of the HTTP response, where the request is refused before it is queued.
    """

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a result."""

    content: bytes
    media_type: str = "application/json"

    @classmethod
    def of(cls, model: BaseModel) -> Answer:
        """Return one of the SDK's types as JSON."""
        return cls(model.model_dump_json(exclude_none=True).encode())

    @property
    def failed(self) -> bool:
        """Whether it is that of `failure`."""
        return self.content.startswith(b'{"error":')


def outcome(compute: Callable[[], Answer]) -> Answer:
    """Return what `compute` returns, or its error."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001 - it ends this request, not the server
        return failure(error)


def in_short(error: VoxError) -> str:
    """Return the fault and the code; log the whole error, which has paths of the server."""
    log.warning("a request failed: %s", error)
    return f"{error.what} ({error.code})"


def failure(error: Exception) -> Answer:
    """Return an error as the SDK's `RequestFailedResponse`."""
    user, server = types.RequestErrorCategory.User, types.RequestErrorCategory.Server
    category = user if isinstance(error, Refused | InputError) else server
    if isinstance(error, VoxError):
        faults = error.faults if category is user else ()  # others name places of the server
        text = "\n- ".join((in_short(error), *faults))
    elif isinstance(error, Refused):
        text = str(error)
    else:
        log.error("a request failed", exc_info=error)
        text = f"internal error: {type(error).__name__}"
    return Answer.of(types.RequestFailedResponse(error=text, category=category))


class Futures:
    """Results by request id."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._futures: dict[str, asyncio.Future[Answer]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    def create(self, request_id: str) -> None:
        """Begin a result; the oldest finished ones are forgotten."""
        if len(self._futures) >= 2 * KEPT:
            done = [name for name, future in self._futures.items() if future.done()]
            for name in done[:-KEPT]:
                del self._futures[name]
        self._futures[request_id] = self._loop.create_future()

    def put(self, request_id: str, answer: Answer) -> None:
        """Begin a result that is known."""
        self.create(request_id)
        self._futures[request_id].set_result(answer)

    def resolve_soon(
        self, request_id: str, answer: Answer, then: Callable[[], None] = lambda: None
    ) -> None:
        """Set a result, from any thread; `then` is called on the event loop's."""

        def resolve() -> None:
            self._futures[request_id].set_result(answer)
            then()

        self._loop.call_soon_threadsafe(resolve)

    async def retrieve(self, request_id: str, seconds: float) -> Answer | None:
        """Wait for a result; None if it is not there in time.

        Raises:
            Refused: 410, there is no such request.
        """
        if (future := self._futures.get(request_id)) is None:
            raise Refused(f"request {request_id!r} is not known; send it again", 410)
        await asyncio.wait({future}, timeout=seconds)
        return future.result() if future.done() else None
