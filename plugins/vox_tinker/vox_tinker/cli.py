"""`vox tinker serve`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.api.commands import (
    Command,
    ServeSettings,
    TrainSettings,
    options_of,
    print_table,
    settings_from,
)
from vox_core.api.progress import display

if TYPE_CHECKING:
    from vox_tinker.sessions import Served

LISTEN = ("host", "port")
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
        *(option for option in options_of(ServeSettings) if option.name in LISTEN),
        *(option for option in options_of(TrainSettings) if option.name in COMPUTE),
        click.Option(
            ["--out"],
            type=click.Path(path_type=Path),
            default=Path("runs"),
            help="Folder of the training clients' runs.  [default: runs]",
        ),
        click.Option(
            ["--api-key"],
            envvar="VOX_API_KEY",
            metavar="KEY",
            help="Require this key, which begins with tml-; better in VOX_API_KEY, because other "
            "users can read command lines.",
        ),
        options_of(ServeSettings)[-1],
    ],
    epilog="Example: vox tinker serve --model smollm2-135m --port 8000",
)
def serve(
    models: tuple[str, ...], out: Path, api_key: str | None, config_file: Path | None, **flags: Any
) -> None:
    """Serve models to clients of the Tinker SDK.

    Set TINKER_BASE_URL to the printed address, and TINKER_API_KEY to the key, or to tml-local where
    there is none. Each training client is a run folder under --out.
    """
    listen = settings_from(ServeSettings, config_file, {name: flags[name] for name in LISTEN})
    compute = settings_from(TrainSettings, config_file, {name: flags[name] for name in COMPUTE})
    given = compute.model_fields_set & {*COMPUTE}
    settings = TrainSettings(**{name: getattr(compute, name) for name in given})
    from vox_tinker import server

    with display() as shown:
        server.serve(
            models,
            settings,
            listen.host,
            listen.port,
            out,
            api_key,
            ready=_show,
            observe=shown.observe,
            progress=shown.transfer,
        )


def _show(url: str, models: Mapping[str, Served]) -> None:
    bases = [(name, each.base.inputs.model.id) for name, each in models.items()]
    print_table([("TINKER_BASE_URL", url), *bases])
