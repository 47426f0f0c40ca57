"""`vox tinker serve`: the Tinker training API on any backend of vox.

    cli.py          the command
    server.py       from settings to a server that answers until a signal ends it
    app.py          endpoints, authentication, errors
    wire.py         bodies <-> arrays, with the SDK's own types
    futures.py      results by request id, retrieved by long polling
    sessions.py     sessions, their models and samplers; the order of requests
    training.py     a training client's learner: gradients, steps, state
    losses.py       loss functions as weights of log-probabilities
    sampling.py     samplers and their requests
    checkpoints.py  run folders and saved weights on the disk
    engine.py       the thread that computes

Only `tinker` of one minor version is served: its types are the wire format.
"""

from __future__ import annotations

from vox_core.hookspecs import hookimpl
from vox_tinker.settings import TinkerSettings


@hookimpl
def vox_settings() -> type[TinkerSettings]:
    return TinkerSettings
