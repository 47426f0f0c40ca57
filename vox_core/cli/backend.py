"""`vox backend`: list."""

from __future__ import annotations

import click

from vox_core.cli.lazy import Group
from vox_core.cli.options import json_option
from vox_core.cli.output import print_columns, print_json


@click.group("backend", cls=Group)
def backend() -> None:
    """Backends that are installed here."""


@backend.command("list", params=[json_option()])
def list_installed(as_json: bool) -> None:
    """List the installed backends, and say which of them can work here."""
    from vox_core.host import list_backends

    verdicts = list_backends()
    if as_json:
        print_json(verdicts)
    elif verdicts:
        print_columns((each.id, each.version, each.status, each.reason) for each in verdicts)
    else:
        click.echo("no backend is installed; for one on the CPU: pip install vox-ml-cpu", err=True)
