"""Adapters added and removed while the server runs; off unless `--allow-adapters FOLDER`.

A client names a folder inside FOLDER, never another path. An adapter is checked as at the start:
its base is the loaded one, its digest that of training, and its log-probabilities too. The model
computes these on the engine's thread, one text between two steps, so running answers go on and do
not change. A removed adapter takes no new requests; its running answers finish first.

The endpoints are `POST /v1/adapters` and `DELETE /v1/adapters/NAME`, and vLLM's
`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.routing import Route

from vox_core.api.generating import OpenBase
from vox_core.api.models import read_probe, resolve_reference
from vox_core.api.tokenizers import load_tokenizer
from vox_core.errors import ProofError, VoxError
from vox_serve.engine import Engine, EngineFailed
from vox_serve.guard import json_response, read_body, unavailable
from vox_serve.requests import ApiError, parse
from vox_serve.served import NAME, Proof, Selection, Served, prove, require_one_base

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from vox_core.contract import Batch, Floats, Model

MOST = 64
"""Models of a server, its base among them."""
log = logging.getLogger("vox_serve")
R = TypeVar("R")

_Text = Annotated[str, Field(min_length=1, max_length=512)]


class AdapterRequest(BaseModel):
    """The body of a request to add or to remove an adapter, in vox's words or vLLM's.

    Args:
        path: of a folder, inside the one that the server allows.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    name: _Text = Field(validation_alias=AliasChoices("name", "lora_name"))
    path: _Text | None = Field(None, validation_alias=AliasChoices("path", "lora_path"))


class Adapters:
    """The models of a running server, to which adapters are added.

    Args:
        allowed: the folder that holds them.
        models: changed on the event loop alone.
    """

    def __init__(
        self,
        allowed: Path,
        chosen: Selection,
        models: dict[str, Served],
        opened: OpenBase,
        engine: Engine,
    ) -> None:
        self._allowed, self._models = allowed.resolve(), models
        self._base = next(each for each in models.values() if each.adapter is None)
        self._source = replace(chosen.source, adapter=None)
        self._opened, self._engine = opened, engine
        self._one_at_a_time = asyncio.Lock()
        self.routes = [
            Route("/v1/adapters", self._add, methods=["POST"]),
            Route("/v1/adapters/{name:path}", self._delete, methods=["DELETE"]),
            Route("/v1/load_lora_adapter", self._add, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
        ]

    async def _add(self, request: Request) -> Response:
        asked = parse(AdapterRequest, await read_body(request))
        async with self._one_at_a_time:
            self._require_free(asked.name)
            folder = self._folder(asked.path or asked.name)
            served, proof = await run_in_threadpool(_refused, self._loaded, asked.name, folder)
            self._models[asked.name] = served
        found = {"id": asked.name, "object": "model", "parent": self._base.name}
        return json_response({**found, "verification": str(proof)})

    async def _unload(self, request: Request) -> Response:
        return await self._removed(parse(AdapterRequest, await read_body(request)).name)

    async def _delete(self, request: Request) -> Response:
        return await self._removed(request.path_params["name"])

    async def _removed(self, name: str) -> Response:
        async with self._one_at_a_time:
            served = self._models.get(name)
            if served is None or served.adapter is None:
                there = ", ".join(n for n, each in self._models.items() if each.adapter) or "none"
                found = f"there is no adapter {name[:80]!r}; there are: {there}"
                raise ApiError(404, found, param="name", code="model_not_found")
            del self._models[name]
            await run_in_threadpool(_refused, self._unloaded, name)
        return json_response({"id": name, "object": "model", "deleted": True})

    def _require_free(self, name: str) -> None:
        if not NAME.fullmatch(name):
            found = "an adapter's name has letters, digits and . _ : / + -"
        elif name in self._models:
            found = f"there is a model {name!r} already; choose another name, or remove it first"
        elif len(self._models) >= MOST:
            found = f"there are {MOST} models, as many as may be; remove one first"
        else:
            return
        raise ApiError(400, found, param="name")

    def _folder(self, path: str) -> Path:
        """Return a folder inside the allowed one.

        Raises:
            ApiError: 404.
        """
        try:
            found = (self._allowed / path).resolve()
            if found.is_relative_to(self._allowed) and found.is_dir():
                return found
        except (OSError, ValueError, RuntimeError):
            pass  # a name that no file can have, or a circle of links
        raise ApiError(404, "the folder that the server allows has no such folder", param="path")

    def _loaded(self, name: str, folder: Path) -> tuple[Served, Proof]:
        """Load and verify an adapter; nothing of one that fails stays."""
        source, model = resolve_reference(str(folder)), self._opened.model
        if (state := source.adapter) is None:
            raise ApiError(400, "the folder holds no adapter", param="path")
        require_one_base({self._base.name: self._source, name: source})
        probe, dtype = read_probe(source), self._opened.job.dtype
        served = Served(name, load_tokenizer(source.base.tokenizer), self._base.name)
        served.vocabulary = min(served.vocabulary, self._base.vocabulary)
        between = cast("Model", _BetweenSteps(model, self._engine))
        requantised = source.quant != self._opened.job.quant
        self._engine.call(lambda: model.add_adapter(name, state))
        try:
            reads = self._opened.positions
            return served, prove(between, served, probe, dtype, reads, requantised=requantised)
        except BaseException:
            self._engine.call(lambda: model.remove_adapter(name))
            raise

    def _unloaded(self, name: str) -> None:
        def remove() -> None:
            self._opened.generator.forget(name)
            self._opened.model.remove_adapter(name)

        self._engine.call(remove, unused=name)


class _BetweenSteps:
    """Log-probabilities of a model that generates, each text between two steps."""

    def __init__(self, model: Model, engine: Engine) -> None:
        self._model, self._engine = model, engine

    def log_probs(
        self, batch: Batch, adapter: str | None = None, seed: int | None = None
    ) -> Floats:
        return self._engine.call(lambda: self._model.log_probs(batch, adapter, seed))


def _refused(function: Callable[..., R], *given: Any) -> R:
    """Call a function; answer its errors without the paths that they name.

    Raises:
        ApiError: 400 or 503.
    """
    try:
        return function(*given)
    except EngineFailed as error:
        raise unavailable(error) from error
    except ProofError as error:
        found = f"{error.what}: {error.found}; expected: {error.expected}"
        raise ApiError(400, f"{found} ({error.code})", param="path") from error
    except VoxError as error:
        log.warning("an adapter was refused: %s", error)
        found = f"{error.what} ({error.code}); the server's log has the details"
        raise ApiError(400, found, param="path") from error
