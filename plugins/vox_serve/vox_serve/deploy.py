"""`vox serve --emit`: the same server as a file for Ray Serve or Kubernetes.

    ray         for `serve deploy` and `serve run`; the application is `application`, below
    kubernetes  a Deployment and a Service, for `kubectl apply`

No file has the API key: replicas read it from VOX_API_KEY, which in Kubernetes comes from a Secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import yaml

from vox_core.api.serving import require_key
from vox_core.errors import ConfigError
from vox_serve.served import Selection, select
from vox_serve.server import opened, require_allowed
from vox_serve.settings import ServeSettings

if TYPE_CHECKING:
    from starlette.applications import Starlette

KEY = "VOX_API_KEY"
RUNS, PORT = "/runs", 8000
"""Where a container has runs, and listens."""
ROWS = 64
"""Answers at once of the engine that generates most; other engines' queues hold the rest back."""


def emitted(
    kind: str,
    references: Sequence[str],
    names: Sequence[str],
    settings: ServeSettings,
    key: str | None,
    image: str | None,
) -> str:
    """Return the file, in YAML.

    Args:
        references, names: see `select`.

    Raises:
        InputError: an option is missing, or a model cannot be served.
    """
    require_allowed(settings)
    quant_set = settings.quant is not None
    paths = {name: value for name, value in settings if isinstance(value, Path)}
    if kind == "kubernetes":
        _require_none(paths)
        if image is None:
            raise ConfigError(
                "C004",
                "Kubernetes needs a container image that has vox",
                where="--image",
                remedy="name one: --image registry.example/vox:1",
            )
        return _kubernetes(select(references, names, quant_set=quant_set), settings, image)
    require_key(settings.host, key)
    settings = settings.model_copy(update={name: Path.cwd() / each for name, each in paths.items()})
    chosen = select(references, names, quant_set=quant_set)
    return str(yaml.safe_dump(_ray(chosen, settings, keyed=key is not None), sort_keys=False))


def _set(settings: ServeSettings, *without: str) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    return settings.model_dump(mode="json", exclude_defaults=True, exclude={*without})


# --- Ray Serve ------------------------------------------------------------------------------------


def _ray(chosen: Selection, settings: ServeSettings, *, keyed: bool) -> dict[str, Any]:
    found = {
        name: str(Path(each).resolve()) if Path(each).exists() else each
        for name, each in chosen.references.items()
    }
    deployment = {
        "name": "Vox",
        "num_replicas": 1,
        # Those that it generates at once, and its queue.
        "max_ongoing_requests": (settings.max_batch or ROWS) + settings.queue,
        "graceful_shutdown_timeout_s": settings.drain,
    }
    application_ = {
        "name": "vox",
        "route_prefix": "/",
        "import_path": f"{__name__}:application",
        "args": {"models": found, "settings": _set(settings, "host", "port"), "key": keyed},
        "deployments": [deployment],
    }
    return {
        "http_options": {"host": settings.host, "port": settings.port},
        "applications": [application_],
    }


def application(args: Mapping[str, Any]) -> Any:
    """Return Ray Serve's application of an emitted file; each replica loads and verifies the
    models.

    Args:
        args: `models` (name -> reference), `settings` that are not defaults, and `key`: whether
            replicas must have VOX_API_KEY.
    """
    from ray import serve

    ingress: Callable[..., Any] = serve.ingress(_opener(dict(args)))

    @ingress
    class Vox:
        pass

    return serve.deployment(Vox, name="Vox").bind()


def _opener(args: Mapping[str, Any]) -> Callable[[], Starlette]:
    def opening() -> Starlette:
        if args["key"] and not os.environ.get(KEY):
            what = "the replica has no API key, and the server was set up with one"
            raise ConfigError("C004", what, where=KEY, remedy=f"set {KEY} where Ray starts")
        names = [f"{name}={reference}" for name, reference in args["models"].items()]
        settings = ServeSettings.model_validate(args["settings"])
        stack = ExitStack()
        key = os.environ[KEY] if args["key"] else None
        api, *_ = stack.enter_context(opened((), names, settings, key))
        api.app.state.opened = stack  # until the replica's process ends
        return api.app

    return opening


# --- Kubernetes -----------------------------------------------------------------------------------


def _require_none(paths: Mapping[str, Path]) -> None:
    """Refuse settings with a path, which the container does not have.

    Raises:
        ConfigError: C004.
    """
    for name, value in paths.items():
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(
            "C004",
            "a container does not have the paths of this machine",
            where=flag,
            found=value,
            remedy=f"leave it out, and add {flag} to `command` in the file, with the path in the "
            f"container: the volume of runs is {RUNS}",
        )


def _kubernetes(chosen: Selection, settings: ServeSettings, image: str) -> str:
    template = Template(files(__package__).joinpath("kubernetes.yaml").read_text(encoding="utf-8"))
    values = {
        "command": _command(chosen, settings),
        "grace": round(settings.drain) + 10,
        "image": image,
        "key": KEY,
        "memory": f"{2 * chosen.source.weights.nbytes >> 20}Mi",
        "port": PORT,
        "runs": RUNS,
    }
    return template.substitute({name: json.dumps(value) for name, value in values.items()})


def _command(chosen: Selection, settings: ServeSettings) -> list[str]:
    command = ["vox", "serve", "--host", "0.0.0.0", "--port", str(PORT)]
    for name, value in _set(settings, "host", "port").items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    for name, each in chosen.references.items():
        inside = f"{RUNS}/{Path(each).resolve().name}" if Path(each).exists() else each
        command += ["--name", f"{name}={inside}"]
    return command
