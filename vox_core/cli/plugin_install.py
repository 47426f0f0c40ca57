"""`vox plugin install`, `upgrade`, `remove` and `lock`.

The plan is shown first, with `--json` on stderr. Without `--yes` the user must confirm it; without
a terminal the command fails and changes nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from packaging.utils import canonicalize_name

from vox_core.cli.lazy import Command, json_option
from vox_core.cli.options import config_option
from vox_core.cli.output import megabytes, print_json, printable, say
from vox_core.errors import ConfigError, InputError
from vox_core.host.blocked import COMMAND, blocking, disabled, set_disabled
from vox_core.host.discover import discover
from vox_core.host.doctor import leaving
from vox_core.install.apply import apply
from vox_core.install.plan import Change, InstallPlan, plan_install, plan_remove, plan_upgrade


def plan_options() -> list[click.Parameter]:
    """Return the options that `carry_out` takes."""
    return [
        click.Option(["--yes"], is_flag=True, help="Do not ask for confirmation."),
        click.Option(["--dry-run"], is_flag=True, help="Show the plan and change nothing."),
        click.Option(
            ["--verbose"], is_flag=True, help="Show the SHA-256 and address of each package."
        ),
        json_option(),
    ]


def _ids(required: bool) -> click.Argument:
    return click.Argument(["ids"], nargs=-1, required=required, metavar="ID...")


def _allow_source() -> click.Option:
    return click.Option(
        ["--allow-source"],
        is_flag=True,
        help="Build packages that have no wheel; planning runs their build scripts, too.",
    )


def _path_option(flag: str, help: str) -> click.Option:
    return click.Option([flag], metavar="PATH", type=click.Path(path_type=Path), help=help)


@click.command(
    "install",
    cls=Command,
    params=[
        _ids(required=False),
        _path_option("--from-path", "Source folder of one plugin."),
        _path_option("--from-wheel", "Wheel of one plugin."),
        click.Option(
            ["--from-pypi"], metavar="NAME==VERSION", help="One plugin from the package index."
        ),
        _allow_source(),
        config_option(),
        *plan_options(),
    ],
)
def install(
    ids: tuple[str, ...],
    from_path: Path | None,
    from_wheel: Path | None,
    from_pypi: str | None,
    allow_source: bool,
    **how: bool,
) -> None:
    """Install plugins into the Python environment that vox runs in.

    ID is an id of `vox plugin list`; the catalog maps it to a package. ID is optional with a --from
    option.
    """
    sources = [source for source in (from_path, from_wheel, from_pypi) if source]
    if len(sources) > 1 or (sources and len(ids) > 1) or not (sources or ids):
        raise ConfigError(
            "C006",
            "no plugin to install, or several sources for one",
            found=f"{len(ids)} ids and {len(sources)} --from options",
            expected="ids of the catalog, or one --from option with at most one id",
            remedy="see `vox plugin install --help`",
        )
    source = sources[0] if sources else None
    plan = plan_install(ids, source=source, allow_source=allow_source, report=say)
    carry_out(plan, **how)
    _say_what_is_disabled(plan)


@click.command(
    "upgrade",
    cls=Command,
    params=[_ids(required=False), _allow_source(), config_option(), *plan_options()],
)
def upgrade(ids: tuple[str, ...], allow_source: bool, **how: bool) -> None:
    """Upgrade the given plugins, or all installed ones, from their sources."""
    carry_out(plan_upgrade(ids, allow_source=allow_source, report=say), **how)


@click.command("remove", cls=Command, params=[_ids(required=True), *plan_options()])
def remove(ids: tuple[str, ...], **how: bool) -> None:
    """Remove plugins, broken ones too; their dependencies stay.

    ID is a plugin's id, or the name of its package if two plugins have the same id. Removing a
    disabled plugin also clears that mark: it is enabled when installed again.
    """
    plan = plan_remove(ids)
    forgotten = {*disabled()} & leaving([change.name for change in plan.changes])
    if carry_out(plan, **how) and forgotten:
        set_disabled({*disabled()} - forgotten)
        was = f"{', '.join(sorted(forgotten))}: no longer marked as disabled"
        click.echo(was, err=how["as_json"])


# --- a plan, shown, agreed to, carried out --------------------------------------------------------


def carry_out(plan: InstallPlan, yes: bool, dry_run: bool, verbose: bool, as_json: bool) -> bool:
    """Show the plan, ask for confirmation and apply it; return whether anything changed."""
    for line in _plan_lines(plan, verbose):
        click.echo(printable(line), err=as_json)
    done = bool(plan.changes) and not dry_run
    if done:
        if not yes:
            _require_agreement()
        apply(plan, lambda line: say(f"  {line}"))
    if as_json:
        print_json(_described(plan, done))
    elif done:
        click.echo(f"{_DONE[plan.action]}; next: {_next(plan)}")
    return done


def _next(plan: InstallPlan) -> str:
    """Return a command to run after the change."""
    importlib.invalidate_caches()
    names = {canonicalize_name(change.name) for change in plan.changes}
    found = [each for each in discover() if canonicalize_name(each.distribution) in names]
    manifests = [each.manifest for each in found if each.manifest and plan.action != "remove"]
    if any(manifest.is_backend for manifest in manifests):
        return "vox backend list"
    for manifest in manifests:
        if manifest.commands:
            return f"vox {manifest.commands[0].name} --help"
    return "vox plugin list"


def _say_what_is_disabled(plan: InstallPlan) -> None:
    """Note the installed plugins that are still disabled, as they would be silently left out."""
    names = {target.distribution for target in plan.targets}
    ids = {each.id for each in discover() if canonicalize_name(each.distribution) in names}
    for id in sorted({*disabled()} & {*ids, *(target.id for target in plan.targets)}):
        click.echo(f"note: {id} is {blocking(id, COMMAND)}", err=True)


_DONE = {"install": "installed", "upgrade": "upgraded", "remove": "removed"}


def _plan_lines(plan: InstallPlan, verbose: bool) -> Iterator[str]:
    if plan.changes:
        yield f"{plan.action} in {plan.environment}"
        yield from (f"  {_line(change, verbose)}" for change in plan.changes)
        total = sum(change.size or 0 for change in plan.changes)
        yield from [f"  {_size(total)} to download"] if total else []
        if built := [change.name for change in plan.changes if change.built]:
            yield f"  built on this machine, which runs its code: {', '.join(built)}"
    else:
        yield f"nothing to {plan.action}: already up to date"
    yield from (f"note: {note}" for note in plan.notes)


def _line(change: Change, verbose: bool = False) -> str:
    """Format a change: `vox-ml-cpu 0.1.0 -> 0.2.0 12 MB`, and its address if it is not from the
    index."""
    if change.after is None:
        return f"{change.name}  {change.before} -> none"
    facts = [change.name, _versions(change)]
    facts += [_size(change.size)] if change.size is not None else []
    if change.direct or verbose:
        facts.append(f"from {change.source or 'the index'}")
    facts += [f"sha256 {change.sha256}"] if change.sha256 and verbose else []
    return "  ".join(facts)


def _versions(change: Change) -> str:
    if change.before is None:
        return f"{change.after} (new)"
    if change.before == change.after:
        return f"{change.after} again ({'built anew' if change.built else 'its content differs'})"
    return f"{change.before} -> {change.after}"


def _size(count: int) -> str:
    return megabytes(count) if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _described(plan: InstallPlan, done: bool) -> dict[str, Any]:
    environment = plan.environment
    return {
        "action": plan.action,
        "environment": {"prefix": environment.prefix, "kind": environment.kind},
        "changes": plan.changes,
        "notes": plan.notes,
        "done": done,
    }


def _require_agreement() -> None:
    """Ask for confirmation on the terminal (I012 without one; click.Abort if the answer is no)."""
    if not sys.stdin.isatty():
        raise InputError(
            "I012",
            "the plan needs confirmation, and there is no terminal",
            remedy="check the plan and run again with --yes",
        )
    click.confirm("continue?", abort=True, err=True)
