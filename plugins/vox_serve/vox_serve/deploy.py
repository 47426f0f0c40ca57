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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vox_core.api.commands import ServeSettings
from vox_core.errors import ConfigError
from vox_serve.served import Selection, select
from vox_serve.server import opened, require_allowed, require_key

if TYPE_CHECKING:
    from starlette.applications import Starlette

KEY = "VOX_API_KEY"
RUNS, CACHE, PORT = "/runs", "/cache", 8000
"""Where a container has runs and vox's caches, and listens."""
STARTUP_SECONDS = 1800
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
    paths = {name: value for name, value in settings if isinstance(value, Path)}
    if kind == "kubernetes":
        _require_none(paths)
    chosen = select(references, names, quant_set=settings.quant is not None)
    if kind == "ray":
        require_key(settings.host, key)
        absolute = {name: Path.cwd() / value for name, value in paths.items()}
        settings = settings.model_copy(update=absolute)
        documents = [_ray(chosen, settings, keyed=key is not None)]
    elif image is None:
        raise ConfigError(
            "C004",
            "Kubernetes needs a container image that has vox",
            where="--image",
            remedy="name one: --image registry.example/vox:1",
        )
    else:
        documents = _kubernetes(chosen, settings, image)
    plain = json.loads(json.dumps(documents))  # no part twice, which YAML would write as an alias
    return str(yaml.safe_dump_all(plain, sort_keys=False))


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
        "max_ongoing_requests": _answers(settings),
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


def _answers(settings: ServeSettings) -> int:
    """Requests that a replica takes: what it generates at once, and its queue."""
    return (settings.max_batch or ROWS) + settings.queue


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


def _kubernetes(chosen: Selection, settings: ServeSettings, image: str) -> list[dict[str, Any]]:
    labels = {"app.kubernetes.io/name": "vox-serve"}
    head = {"name": "vox-serve", "labels": labels}
    pod = {
        "terminationGracePeriodSeconds": round(settings.drain) + 10,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(chosen, settings, image)],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": "vox-runs", "readOnly": True}},
            {"name": "cache", "emptyDir": {}},
        ],
    }
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    port = {"name": "http", "port": 80, "targetPort": "http"}
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": head, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": head,
            "spec": {"selector": labels, "ports": [port]},
        },
    ]


def _container(chosen: Selection, settings: ServeSettings, image: str) -> dict[str, Any]:
    command = ["vox", "serve", "--host", "0.0.0.0", "--port", str(PORT)]
    for name, value in _set(settings, "host", "port").items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    for name, each in chosen.references.items():
        inside = f"{RUNS}/{Path(each).resolve().name}" if Path(each).exists() else each
        command += ["--name", f"{name}={inside}"]
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10}
    secret = {"secretKeyRef": {"name": "vox-api-key", "key": KEY}}
    return {
        "name": "vox-serve",
        "image": image,
        "command": command,
        "env": [
            {"name": KEY, "valueFrom": secret},
            {"name": "XDG_CACHE_HOME", "value": CACHE},
            {"name": "TMPDIR", "value": CACHE},
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {**health, "failureThreshold": STARTUP_SECONDS // 10},
        "readinessProbe": health,
        "livenessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 10},
        "resources": {"requests": {"memory": f"{2 * chosen.source.weights.nbytes >> 20}Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "runs", "mountPath": RUNS, "readOnly": True},
            {"name": "cache", "mountPath": CACHE},
        ],
    }
