"""click commands with the options common to all of vox, and a group that imports them lazily.

A `LazyGroup` is a table, name -> module and help line, plus the commands that installed plugins
declare in their manifests for this group. Listing commands imports none of them. A name of the core
wins over a plugin's. Of a name that two plugins declare, `[plugin.provider]` in `vox.toml` decides.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import click
from click.core import augment_usage_errors


class Lazy(NamedTuple):
    """A command's location (`module:attribute`), help line, and the plugin that declares it."""

    target: str
    help: str
    plugin: str = ""


class UnknownCommand(click.UsageError):
    """A name that a group has no command for; `known` lists those that it has."""

    def __init__(self, name: str, known: list[str], ctx: click.Context) -> None:
        super().__init__(f"unknown command {name}", ctx)
        self.name, self.known = name, known


class Command(click.Command):
    """A command that takes `-h`, and `--debug` anywhere on the line.

    Args:
        sections: heading -> names of the options under it, in order; the rest stand at the end.
    """

    def __init__(
        self, *args: Any, sections: Mapping[str, tuple[str, ...]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections or {}
        self.params.append(_debug_option())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = [(name, it) for it in self.get_params(ctx) for name in it.opts + it.secondary_opts]
        options = {name: it for name, it in named if name[0] == "-"}
        with augment_usage_errors(ctx):  # an option without its value names no command otherwise
            for one, next_one in pairwise(takewhile("--".__ne__, args)):
                switch = getattr(options.get(one), "secondary_opts", ())
                if switch and next_one.lower() in ("true", "false"):
                    what = f"{one} takes no value; its opposite is {switch[0]}"
                    raise click.BadOptionUsage(one, what)
                takes_value = not getattr(options.get(one), "is_flag", True)
                if takes_value and next_one.partition("=")[0] in options:
                    what = f"{one} needs a value; found the option {next_one}"
                    raise click.BadOptionUsage(one, what)
            return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, in the order of `sections`."""
        records: dict[str, tuple[str, str]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and (record[1] or isinstance(parameter, click.Option)):
                records[parameter.name or ""] = record
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names if name in records])
        with formatter.section("Options"):
            formatter.write_dl([*records.values()])


class Group(click.Group):
    """A group that raises `UnknownCommand` for unknown commands."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_debug_option())

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            raise UnknownCommand(args[0], [*self.known(ctx)], ctx)
        return super().resolve_command(ctx, args)

    def known(self, ctx: click.Context) -> Iterable[str]:
        """Return the commands, with those of groups: `plugin install`; imports no plugin."""
        return self.list_commands(ctx)


class LazyGroup(Group):
    """A group built from a table and from the manifests of installed plugins.

    Args:
        path: the group's own path below `vox`; plugins add commands under it.
    """

    def __init__(
        self, *args: Any, table: Mapping[str, Lazy], path: tuple[str, ...] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.table, self.path = table, path

    @cached_property
    def declared(self) -> dict[str, tuple[Lazy, ...]]:
        """Commands of plugins by name, without those of VOX_DISABLE_PLUGINS; more than one entry
        where plugins declare the same name."""
        from vox_core.cli.plugin_commands import installed_commands

        disabled = os.environ.get("VOX_DISABLE_PLUGINS", "").replace(" ", "").split(",")
        entries: dict[str, list[Lazy]] = {}
        for command in installed_commands():
            below = command.path[len(self.path) :]
            if command.path[: len(self.path)] == self.path and command.plugin not in disabled:
                if len(below) == 1:
                    entry = Lazy(command.entry, command.help, command.plugin)
                    entries.setdefault(below[0], []).append(entry)
                elif below and below[0] not in entries:
                    entries[below[0]] = [Lazy("", command.help)]
        return {name: tuple(found) for name, found in entries.items() if name not in self.table}

    def known(self, ctx: click.Context) -> Iterator[str]:
        for word in self.list_commands(ctx):
            yield word
            if word in self.table or not self.declared[word][0].target:  # no plugin's
                group = self.get_command(ctx, word)
                if isinstance(group, Group):
                    yield from (f"{word} {name}" for name in group.known(ctx))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the core's commands in the order of the table, then those of plugins."""
        return [*self.table, *self.declared]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.table:
            return _imported(self.table[cmd_name])
        entries, path = self.declared.get(cmd_name, ()), (*self.path, cmd_name)
        if not entries:
            return None
        if not entries[0].target:
            return LazyGroup(name=cmd_name, table={}, path=path, help=entries[0].help)
        return _of_plugin(entries[0] if len(entries) == 1 else _decided(entries, path))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write names and help lines from the tables, importing no command."""
        declared = {name: _shown(entries) for name, entries in self.declared.items()}
        for heading, table in (("Commands", self.table), ("Plugin commands", declared)):
            if table:
                with formatter.section(heading):
                    formatter.write_dl([(name, entry.help) for name, entry in table.items()])


def objection(root: LazyGroup, path: tuple[str, ...]) -> str:
    """Return why a plugin cannot declare the command `path` below `root`; empty if it can."""
    group: click.Command = root
    for number, word in enumerate(path, 1):
        if not isinstance(group, LazyGroup):
            return f"plugins cannot add commands to vox {' '.join(path[: number - 1])}"
        if word not in group.table:
            return ""
        if number < len(path):
            group = _imported(group.table[word])
    return "it is a command of vox itself"


def _shown(entries: Sequence[Lazy]) -> Lazy:
    if len(entries) == 1:
        return entries[0]
    return Lazy("", f"Declared by plugins {' and '.join(each.plugin for each in entries)}.")


def _decided(entries: Sequence[Lazy], path: Sequence[str]) -> Lazy:
    """Return the entry of the plugin that the user's `vox.toml` names (B014 if none)."""
    from vox_core.host.load import provider

    chosen = provider("commands", " ".join(path)).id
    return next(each for each in entries if each.plugin == chosen)


def _imported(entry: Lazy) -> click.Command:
    module, _, attribute = entry.target.partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


def _of_plugin(entry: Lazy) -> click.Command:
    """Import a plugin's command; a `BackendError` if it is disabled, unfit or broken."""
    from vox_core.host.load import load_command, usable_plugin

    return load_command(usable_plugin(entry.plugin), entry.target)


def json_option() -> click.Option:
    what = "Print the result as one JSON object."
    return click.Option(["--json", "as_json"], is_flag=True, help=what)


def _debug_option() -> click.Option:
    """Return `--debug`, which failures.py finds in the raw arguments, even where parsing fails."""
    what = "Show the traceback of an error."
    return click.Option(["--debug"], is_flag=True, expose_value=False, help=what)
