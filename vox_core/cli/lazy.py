"""click commands with what every command of vox has, and a group that imports them when needed.

A `LazyGroup` is a table: name -> where the command is, and the line that help shows for it. Listing
the commands imports none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

WITHIN = "within another command"
"""`obj` of a command that another one runs in its own process, whose start is not its own."""


class Entry(NamedTuple):
    """Where a command is (`module:attribute`), and what it does in one line."""

    target: str
    help: str


class UnknownCommand(click.UsageError):
    """A group has no such command; `known` are those that it has."""

    def __init__(self, name: str, known: list[str], ctx: click.Context) -> None:
        super().__init__(f"unknown command {name}", ctx)
        self.name, self.known = name, known


def _help_names(self: click.Command, ctx: click.Context) -> list[str]:
    """Of a command itself, because click keeps a command's help option for all its contexts."""
    return ["-h", "--help"]


class Command(click.Command):
    """A command that takes `-h`, and `--debug` wherever it stands on the line.

    Args:
        sections: heading -> names of the options under it, for help; the rest stand at the end.
    """

    def __init__(
        self, *args: Any, sections: Mapping[str, tuple[str, ...]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections or {}
        self.params.append(_debug_option())

    get_help_option_names = _help_names

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options under their headings."""
        heading = {name: title for title, names in self.sections.items() for name in names}
        titles = (*self.sections, "Options")
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                rows[heading.get(parameter.name or "", "Options")].append(record)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(click.Group):
    """A group whose unknown commands become `UnknownCommand`."""

    command_class = Command
    get_help_option_names = _help_names

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_debug_option())

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            raise UnknownCommand(args[0], self.list_commands(ctx), ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """A group made from a table."""

    def __init__(self, *args: Any, table: Mapping[str, Entry], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module, _, attribute = self.table[cmd_name].target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.table.items()])


def json_option() -> click.Option:
    """`--json`."""
    return click.Option(
        ["--json", "as_json"], is_flag=True, help="Print the result as one JSON object."
    )


def _debug_option() -> click.Option:
    """`errors.run` looks for it by itself, so that it works even where parsing fails."""
    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, help="Show tracebacks of errors."
    )
