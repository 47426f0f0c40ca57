"""From references to a server that answers until a signal ends it.

The order matters: key, address and models are checked before the model is loaded, and each adapter
before the first request is answered. Requests that come while the model loads wait.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeAlias

import uvicorn

from vox_core.api.generating import OpenBase, apart, open_base
from vox_core.api.host import handled, known_plugins
from vox_core.api.models import Observe, Progress, ignore
from vox_core.api.serving import listening, require_key, url_of
from vox_core.contract import Notice
from vox_core.errors import ConfigError
from vox_serve.adapters import Adapters
from vox_serve.app import Api, Limits
from vox_serve.engine import Engine
from vox_serve.served import Proof, Selection, Served, prove, select, served_models
from vox_serve.settings import ServeSettings
from vox_serve.supervisor import inherited

if TYPE_CHECKING:
    from starlette.applications import Starlette


_Opened: TypeAlias = "tuple[Api, Mapping[str, Proof | None], int]"
"""Endpoints, how each adapter was verified, and answers that may be generated or wait."""
Engines: TypeAlias = (
    "Callable[[Selection, Mapping[str, Served], ServeSettings, str | None, Observe], "
    "AbstractContextManager[_Opened]]"
)
"""What an entry point of `vox_serve.engines` is: it starts the engine, verifies each adapter, and
ends the engine after the block."""
ENTRY_POINTS = "vox_serve.engines"
KEPT = 8192
"""Cached tokens of ended answers, for prompts that begin alike; 190 MB for SmolLM2 in bfloat16."""
CONNECTIONS = 4
"""Open connections for each answer that may be generated or wait."""


def serve(
    opening: AbstractContextManager[_Opened],
    settings: ServeSettings,
    key: str | None,
    ready: Callable[[str, Mapping[str, Proof | None]], None],
) -> None:
    """Serve models until SIGTERM or SIGINT.

    Args:
        opening: see `opened`.
        ready: called before the first request is answered, with the URL and, for each model, how
            its adapter was verified; None for the base.

    Raises:
        InputError: found before the model is loaded.
        ProofError: V004, an adapter does not compute what was trained; V002, it changes nothing.
        BackendError: B004, the engine's program does not start.
    """
    listener, serving = inherited() or (checked_listener(settings, key), lambda: None)
    with closing(listener), opening as (api, proofs, answers):
        ready(url_of(listener) + "/v1", proofs)
        serving()
        run(api.app, listener, settings.drain, CONNECTIONS * answers)


def checked_listener(settings: ServeSettings, key: str | None) -> socket.socket:
    """Check key, address and folder; return a socket that listens. Raises ConfigError."""
    require_key(settings.host, key)
    require_allowed(settings)
    return listening(settings.host, settings.port)


@contextmanager
def opened(
    references: Sequence[str],
    names: Sequence[str],
    settings: ServeSettings,
    key: str | None,
    observe: Observe = ignore,
    progress: Progress | None = None,
) -> Iterator[_Opened]:
    """Load models and verify the adapters, for as long as the block lasts.

    Args:
        references, names: see `select`.
        key: API key; None: requests need none, and come from this machine.
    """
    engine = None if settings.engine == "vox" else _engine(settings.engine)
    chosen = select(references, names, quant_set=settings.quant is not None, progress=progress)
    observe(Notice("loading the tokenizer …"))
    models = served_models(chosen)
    given = (chosen, models, settings, key, observe)
    with engine(*given) if engine else _own(*given) as found:
        yield found


def _engine(name: str) -> Engines:
    """Return the engine of a plugin.

    Raises:
        ConfigError: C009, no installed plugin has it.
    """
    installed = entry_points(group=ENTRY_POINTS)
    if name in installed.names:
        found: Engines = installed[name].load()
        return found
    owners = [p.id for p in known_plugins().values() if name in p.provides.get("engines", ())]
    raise ConfigError(
        "C009",
        "no installed plugin has this engine",
        where="--engine",
        found=name,
        expected=", ".join(["vox", *sorted(installed.names)]),
        remedy=f"vox plugin install {owners[0]}" if owners else "leave out --engine",
    )


@contextmanager
def _own(
    chosen: Selection,
    models: dict[str, Served],
    settings: ServeSettings,
    key: str | None,
    observe: Observe,
) -> Iterator[_Opened]:
    """Load the models with vox's own engine."""
    loaded = apart(_loaded(chosen, models, settings, observe))
    with loaded as (opened, proofs), closing(Engine(opened.generator, settings.queue)) as engine:
        allowed = settings.allow_adapters
        routes = Adapters(allowed, chosen, models, opened, engine).routes if allowed else ()
        api = Api(engine, models, Limits(settings.max_tokens, opened.positions), key, routes)
        yield api, proofs, engine.max_batch + settings.queue


@contextmanager
def _loaded(
    chosen: Selection,
    models: dict[str, Served],
    settings: ServeSettings,
    observe: Observe,
) -> Iterator[tuple[OpenBase, Mapping[str, Proof | None]]]:
    """Load the base with the adapters, and verify each."""
    adapters = {name: each.adapter for name, each in chosen.models.items() if each.adapter}
    rows, base = settings.max_batch, (chosen.source, adapters, settings)
    with open_base(*base, rows=rows, observe=observe) as opened:
        for each in models.values():  # a tokenizer may have more ids than the model
            each.vocabulary = min(each.vocabulary, opened.vocabulary or each.vocabulary)
        opened.generator.keep = KEPT
        proofs: dict[str, Proof | None] = dict.fromkeys(models)
        for name in adapters:
            other = chosen.models[name].quant != opened.job.quant
            of = (opened.model, models[name], chosen.probes.get(name))
            proofs[name] = prove(*of, opened.job.dtype, opened.positions, requantised=other)
        yield opened, proofs


def run(app: Starlette, listener: socket.socket, drain: float, connections: int) -> None:
    """Answer until SIGTERM or SIGINT; running requests then have `drain` seconds to finish.

    Args:
        connections: open at once; more requests get status 503.
    """
    config = uvicorn.Config(
        app,
        access_log=False,
        limit_concurrency=connections,
        lifespan="on",
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=round(drain),
        ws="none",
    )
    # Once it has drained, uvicorn raises its signal again: the command ends as usual.
    with handled(lambda *_: None, signal.SIGINT, signal.SIGTERM):
        uvicorn.Server(config).run([listener])


def require_allowed(settings: ServeSettings) -> None:
    """Check that adapters can be added if they may.

    Raises:
        ConfigError: C002, the folder is not there, or the engine cannot.
    """
    allowed, own = settings.allow_adapters, settings.engine == "vox"
    if allowed is not None and not (own and allowed.is_dir()):
        raise ConfigError(
            "C002",
            "adapters cannot be added from there" if own else "the engine cannot add adapters",
            where="--allow-adapters",
            found=f"{allowed}: no folder" if own else f"--engine {settings.engine}",
            expected="a folder of runs" if own else "--engine vox",
            remedy="name the folder that holds the runs, or leave the flag out",
        )
