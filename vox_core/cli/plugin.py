"""`vox plugin`: list, info, doctor, enable, disable; plugin_install.py has the other commands.

No command here imports a plugin; `doctor` does so in a child process.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from vox_core.cli.lazy import Command, Lazy, LazyGroup, json_option, objection
from vox_core.cli.options import config_option
from vox_core.cli.output import print_columns, print_json, print_table, printable, warn_of_unknown
from vox_core.errors import command
from vox_core.host.blocked import disabled, set_disabled
from vox_core.host.discover import discover
from vox_core.host.doctor import LIMIT_S, Examined, details, examine, inventory, unknown_plugin
from vox_core.install.plan import cut_off

_HERE, _INSTALL = (f"vox_core.cli.{name}" for name in ("plugin", "plugin_install"))

COMMANDS = {
    "list": Lazy(f"{_HERE}:list_plugins", "List installed plugins and those of the catalog."),
    "info": Lazy(f"{_HERE}:info", "Show a plugin's manifest and catalog entry."),
    "install": Lazy(f"{_INSTALL}:install", "Install plugins into this environment."),
    "upgrade": Lazy(f"{_INSTALL}:upgrade", "Upgrade installed plugins."),
    "remove": Lazy(f"{_INSTALL}:remove", "Remove plugins."),
    "doctor": Lazy(f"{_HERE}:doctor", "Check plugins and hardware; suggest fixes."),
    "enable": Lazy(f"{_HERE}:enable", "Undo `vox plugin disable`."),
    "disable": Lazy(f"{_HERE}:disable", "Keep a plugin installed but unused."),
}

plugin = LazyGroup(
    name="plugin",
    table=COMMANDS,
    path=("plugin",),
    help="Install and manage plugins: backends, trackers, more commands.",
)


def _id() -> click.Argument:
    return click.Argument(["id"], metavar="ID")


@click.command("list", cls=Command, params=[config_option(), json_option()])
def list_plugins(as_json: bool) -> None:
    """List the installed plugins and those of the catalog.

    Each line shows a status (installed, disabled, available, incompatible or broken) and the
    reason. No plugin is imported; `vox plugin doctor` checks more.
    """
    listed = inventory()
    warn_of_unknown()
    if as_json:
        print_json(listed)
    elif listed:
        print_columns((each.id, each.version or "-", each.status, each.reason) for each in listed)
    else:
        click.echo("no plugin is installed, and the catalog lists none", err=True)


@click.command("info", cls=Command, params=[_id(), config_option(), json_option()])
def info(id: str, as_json: bool) -> None:
    """Show a plugin's manifest, installation and catalog entry."""
    facts = details(id)
    if as_json:
        print_json(facts)
        return
    for listed in facts["listed"]:
        click.echo(printable(f"{id} is {listed['status']}: {listed['reason']}"))
    for installed in facts["installed"]:
        manifest = installed.pop("manifest") or {}
        _section("installed", {**installed, **manifest})
    _section("catalog", facts["catalog"] or {})


@click.command(
    "doctor",
    cls=Command,
    params=[
        click.Argument(["id"], metavar="[ID]", required=False),
        click.Option(
            ["--timeout"],
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            help="Time limit for each plugin's code.  [default: 30]",
        ),
        config_option(),
        json_option(),
    ],
)
def doctor(id: str | None, timeout: float | None, as_json: bool) -> int:
    """Check one plugin, or all of them and the environment.

    Each plugin is imported in a child process with a time limit, so one that crashes or hangs is
    reported and stops nothing else. Exit code 1 if a check fails.
    """
    from vox_core.cli import root

    examined = examine(
        id, timeout or LIMIT_S, objection=lambda path: objection(root, path), further=cut_off()
    )
    warn_of_unknown()
    failed = [each.id for each in examined if not each.ok]
    if as_json:
        print_json([{**asdict(each), "ok": each.ok} for each in examined])
        return 1 if failed else 0
    for each in examined:
        _print_examined(each)
    found = f"with problems: {', '.join(failed)}" if failed else "no problems found"
    click.echo(printable(found))
    return 1 if failed else 0


@click.command("enable", cls=Command, params=[_id()])
def enable(id: str) -> None:
    """Undo `vox plugin disable`."""
    before = disabled()
    if id in before:
        click.echo(f"{id} is enabled (recorded in {set_disabled({*before} - {id})})")
        return
    _require_installed(id)
    click.echo(f"{id} is not disabled; nothing was changed")


@click.command("disable", cls=Command, params=[_id()])
def disable(id: str) -> None:
    """Keep a plugin installed, but exclude it from every command and run."""
    _require_installed(id)
    click.echo(f"{id} is disabled (recorded in {set_disabled({*disabled(), id})})")
    click.echo(printable(f"next: {command('vox', 'plugin', 'enable', id)}, to use it again"))


def _print_examined(examined: Examined) -> None:
    of = f"  ({examined.distribution})" if examined.distribution else ""
    click.echo(printable(f"{examined.id}{of}"))
    width = max(len(check.name) for check in examined.checks)
    for check in examined.checks:
        line = f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.detail}"
        click.echo(f"  {printable(line)}")
        if check.remedy and not check.ok:
            click.echo(f"  {'next:':>{width + 6}}  {printable(check.remedy)}")


def _require_installed(id: str) -> None:
    installed = [each.id for each in discover()]
    if id not in installed:
        raise unknown_plugin(id, installed)


def _section(title: str, facts: dict[str, Any]) -> None:
    """Print the facts that are set, one per line; nested tables as `table.key`."""
    rows = dict(_rows(facts))
    if rows:
        click.echo(f"\n{title}")
        print_table(rows)


def _rows(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        name = f"{prefix}{key.replace('_', '-')}"
        if isinstance(value, dict):
            rows += _rows(value, f"{name}.")
        elif value not in (None, "", (), []):
            each = value if isinstance(value, list | tuple) else [value]
            told = (str(one["name"] if isinstance(one, dict) else one) for one in each)
            rows.append((f"  {name}", ", ".join(told)))
    return rows
