"""From settings to a server that answers until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from vox_core.api.files import make_folder
from vox_core.api.generating import apart
from vox_core.api.host import handled
from vox_core.api.plans import seeded
from vox_core.api.serving import LOOPBACK, listening, require_key, url_of
from vox_core.api.settings import TrainSettings
from vox_core.api.training import TrainingBase, open_training_base
from vox_core.contract import TrainState
from vox_core.errors import ConfigError
from vox_tinker.app import Api
from vox_tinker.checkpoints import Store
from vox_tinker.clients import Clients
from vox_tinker.engine import Engine
from vox_tinker.sampling import Adapters
from vox_tinker.sessions import Served, Sessions

if TYPE_CHECKING:
    from vox_core.api.models import Observe, Progress

PREFIX = "tml-"
"""What the SDK wants an API key to begin with."""
KEPT = 8192
"""Cached tokens of ended rows, for the samples of one prompt."""
IDLE = "idle"
"""Name of a learner of rank 1 that each base has, so that it computes without a client."""


def serve(
    models: Sequence[str],
    settings: TrainSettings,
    host: str,
    port: int,
    out: Path,
    key: str | None,
    *,
    ready: Callable[[str, Mapping[str, Served]], None],
    observe: Observe,
    progress: Progress | None = None,
) -> None:
    """Serve models until SIGTERM or SIGINT.

    Args:
        models: references, or `NAME=REFERENCE` to serve one under another name.
        out: folder of the runs.
        ready: called before the first request is answered.

    Raises:
        InputError: found before a model is loaded.
    """
    require_key(host, key, PREFIX)
    named = named_models(models)
    with closing(listening(host, port)) as listener, ExitStack() as stack:
        make_folder(out)
        served = {
            name: stack.enter_context(opened(name, reference, settings, observe, progress))
            for name, reference in named.items()
        }
        ready(url_of(listener), served)
        # Once it has drained, uvicorn raises its signal again: the command ends as usual.
        with handled(lambda *_: None, signal.SIGINT, signal.SIGTERM):
            asyncio.run(answer(served, Store(out), key, listener, local=host in LOOPBACK))


@contextmanager
def opened(
    name: str,
    reference: str,
    settings: TrainSettings,
    observe: Observe,
    progress: Progress | None = None,
) -> Iterator[Served]:
    """Load a base, for as long as the block lasts."""
    chosen = settings.model_copy(
        update={"model": reference, "method": "lora", "rank": 1, "alpha": 1.0, "dropout": 0.0}
    )
    loaded = apart(_loaded(open_training_base(chosen, observe, progress)))
    with loaded as base, closing(Engine(base)) as engine:
        yield Served(name, base, engine, Adapters(base))


@contextmanager
def _loaded(opening: AbstractContextManager[TrainingBase]) -> Iterator[TrainingBase]:
    with opening as base:
        base.trainer.add_learner(IDLE, TrainState(0, seeded(base.plan, base.inputs.weights)))
        base.generator.keep = KEPT
        yield base


async def answer(
    served: Mapping[str, Served],
    store: Store,
    key: str | None,
    listener: socket.socket,
    *,
    local: bool = True,
    started: Callable[[uvicorn.Server], None] = lambda _: None,
) -> None:
    """Answer requests until a signal comes, or `should_exit` of the server is set."""
    clients = Clients(Sessions(served, store, local=local))
    config = uvicorn.Config(
        Api(clients, key).app,
        access_log=False,
        lifespan="off",
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    server = uvicorn.Server(config)
    started(server)
    await server.serve([listener])
    for each in served.values():
        each.engine.close()
    await asyncio.sleep(0)  # the last results are written down
    clients.close()


def named_models(models: Sequence[str]) -> dict[str, str]:
    """Return name -> reference.

    Raises:
        ConfigError: C004, there is none; C002, two have one name.
    """
    found: dict[str, str] = {}
    for each in models:
        name, _, reference = each.rpartition("=")
        name = name or reference
        if name in found or not reference:
            raise ConfigError(
                "C002",
                "each model needs a name of its own",
                where="--model",
                found=each,
                remedy="write --model NAME=MODEL",
            )
        found[name] = reference
    if not found:
        raise ConfigError(
            "C004",
            "there is no model to serve",
            where="--model",
            remedy="name one: --model smollm2-135m",
        )
    return found
