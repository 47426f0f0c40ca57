"""`vox serve`: an OpenAI-compatible server for a base model and the adapters of runs.

    cli.py         the command
    settings.py    its flags, and the section of vox.toml
    supervisor.py  the process of the command: starts a worker that serves, again if it is killed
    server.py      key, address, loading, and answering until a signal
    served.py      references -> models by name on one base; verify each adapter at load
    engine.py      one thread that runs the model; requests join and leave the running batch
    requests.py    the bodies of requests, checked
    grammar.py     what an answer must follow: schemas, regular expressions, tool calls
    tools.py       the calls in an answer's text, in the formats of families
    responses.py   completions, chunks and errors as OpenAI writes them
    guard.py       what stands before every endpoint: key, host name, bodies, errors
    stateless.py   /v1/responses: the request as a chat, the answer as OpenAI's `Response`
    running.py     the answers to one request: collected, or streamed as they come
    app.py         routes, metrics
    page.py        the page at `/`, which is page.html
    deploy.py      --emit: files for Ray Serve and Kubernetes

Further engines (`--engine`) are packages with an entry point in the group `vox_serve.engines`; its
name is the engine's, and its object a function as `server.Engines` describes it.

The event loop of uvicorn parses and writes; it never waits for the model.
"""

from __future__ import annotations

from vox_core.hookspecs import hookimpl
from vox_serve.settings import ServeSettings


@hookimpl
def vox_settings() -> type[ServeSettings]:
    return ServeSettings
