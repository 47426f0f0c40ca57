"""`vox tinker serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vox_core.api.commands import Command, options_of, print_table, settings_from
from vox_core.api.progress import display
from vox_core.api.settings import TrainSettings
from vox_tinker.settings import TinkerSettings

if TYPE_CHECKING:
    from vox_tinker.sessions import Served

COMPUTE = (
    "backend", "dtype", "quant", "micro_batch_tokens", "gradient_checkpointing", "allow_cpu",
)  # fmt: skip


@click.command(
    "serve",
    cls=Command,
    params=[
        click.Option(
            ["--model", "models"],
            multiple=True,
            metavar="[NAME=]MODEL",
            help="Base model, under its own name or another. Repeatable.",
        ),
        *(option for option in options_of(TrainSettings) if option.name in COMPUTE),
        click.Option(
            ["--api-key"],
            envvar="VOX_API_KEY",
            metavar="KEY",
            help="Require this key, which begins with tml-; better in VOX_API_KEY, because other "
            "users can read command lines.",
        ),
        *options_of(TinkerSettings),
    ],
    epilog="Example: vox tinker serve --model smollm2-135m --port 8000",
)
def serve(models: tuple[str, ...], api_key: str | None, **flags: Any) -> None:
    """Serve models to clients of the Tinker SDK.

    Set TINKER_BASE_URL to the printed address, and TINKER_API_KEY to the key, or to tml-local where
    there is none. Each training client is a run folder under --out.
    """
    of_training = {name: flags.pop(name) for name in COMPUTE}
    own = settings_from(TinkerSettings, flags)
    compute = settings_from(TrainSettings, of_training)
    given = compute.model_fields_set & {*COMPUTE}
    settings = TrainSettings(**{name: getattr(compute, name) for name in given})
    from vox_tinker import server

    with display() as shown:
        server.serve(
            models,
            settings,
            own.host,
            own.port,
            own.out,
            api_key,
            ready=_show,
            observe=shown.observe,
            progress=shown.transfer,
        )


def _show(url: str, models: Mapping[str, Served]) -> None:
    bases = [(name, each.base.inputs.model.id) for name, each in models.items()]
    print_table([("TINKER_BASE_URL", url), *bases])
