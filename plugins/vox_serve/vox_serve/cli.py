"""`vox serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vox_core.api.commands import Command, options_of, print_table, settings_from
from vox_core.api.progress import display
from vox_serve.settings import ServeSettings

if TYPE_CHECKING:
    from vox_serve.served import Proof


@click.command(
    "serve",
    cls=Command,
    params=[
        click.Argument(["references"], nargs=-1, metavar="[RUN|MODEL]..."),
        click.Option(
            ["--name", "names"],
            multiple=True,
            metavar="NAME=RUN",
            help="Serve RUN under this name instead of its folder's. Repeatable.",
        ),
        click.Option(
            ["--api-key"],
            envvar="VOX_API_KEY",
            metavar="KEY",
            help="Require this key of at least 16 characters; better in VOX_API_KEY, because other "
            "users can read command lines.",
        ),
        *options_of(ServeSettings),
        click.Option(
            ["--emit"],
            type=click.Choice(["ray", "kubernetes"]),
            help="Print a file that serves the models on Ray Serve or Kubernetes, and exit.",
        ),
        click.Option(["--image"], help="Container image that has vox, for --emit kubernetes."),
    ],
    epilog="Example: vox serve runs/support runs/sales --port 8000",
)
def serve(
    references: tuple[str, ...],
    names: tuple[str, ...],
    api_key: str | None,
    emit: str | None,
    image: str | None,
    **flags: Any,
) -> None:
    """Serve runs and models with OpenAI's HTTP API.

    Each RUN is an adapter beside one base model, which is loaded once; each is a model by the name
    of its folder, and the base is one by its id. Runs of different bases need a server each.
    """
    settings = settings_from(ServeSettings, flags)
    from vox_serve import deploy, server, supervisor

    if emit:
        click.echo(deploy.emitted(emit, references, names, settings, api_key, image), nl=False)
        return
    if settings.engine == "vox" and supervisor.is_needed():
        listener = server.checked_listener(settings, api_key)
        raise SystemExit(supervisor.Supervisor(listener).run())
    with display() as shown:
        given = (references, names, settings, api_key, shown.observe, shown.transfer)
        server.serve(server.opened(*given), settings, api_key, _show)


def _show(url: str, proofs: Mapping[str, Proof | None]) -> None:
    alone = "base" if any(proofs.values()) else "model"
    models = [(name, f"adapter; {proof}" if proof else alone) for name, proof in proofs.items()]
    print_table([("serving", url), ("page", url.removesuffix("v1")), *models])
