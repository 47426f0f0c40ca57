"""Warnings on stderr that several commands have in common."""

from __future__ import annotations

import click

from vox_core.cli.output import printable


def warn_of_unknown() -> None:
    """Of names in `[plugin] blocked` that no plugin has, installed or known."""
    from vox_core.host.blocked import unknown_blocked
    from vox_core.host.discover import discover

    for line in unknown_blocked([plugin.id for plugin in discover()]):
        click.echo(printable(f"warning: {line}"), err=True)
