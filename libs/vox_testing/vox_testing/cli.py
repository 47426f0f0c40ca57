"""`vox plugin new` and `vox plugin check`, for authors of plugins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click

from vox_core.api.commands import Command, json_option, print_columns, print_json, printable
from vox_core.api.files import require_absent
from vox_core.errors import command
from vox_testing.check import LIMIT_S, Outcome, unshown
from vox_testing.check import check as run_suite
from vox_testing.scaffold import Project, render, write


@click.command("new", cls=Command)
@click.argument("name")
@click.option("--id", "id", metavar="ID", help="Name for --backend.  [default: NAME]")
@click.option("--bare", is_flag=True, help="Without the torch engine: write every hook yourself.")
@click.option(
    "--licence", metavar="SPDX", default="Apache-2.0", help="Licence.  [default: Apache-2.0]"
)
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder.  [default: NAME]"
)
def new(name: str, id: str | None, bare: bool, licence: str, out: Path | None) -> None:
    """Create the package of a new backend, with passing tests."""
    project = Project(name, id or name, "bare" if bare else "torch", licence)
    folder = out or Path(name)
    files = render(project)
    require_absent(folder)
    write(folder, files)
    for path in files:
        click.echo(folder / path)
    enter = command("cd", folder)
    click.echo(printable(f'next: {enter} && pip install -e ".[test]" && pytest'))


@click.command(
    "check", cls=Command, params=[click.Argument(["target"], metavar="ID|PATH"), json_option()]
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Time limit for the whole suite.  [default: 3600]",
)
@click.option("-k", "only", metavar="EXPR", help="Run checks whose names match, as pytest's -k.")
@click.option("-x", "first", is_flag=True, help="Stop at the first failure.")
def check(target: str, as_json: bool, timeout: float | None, only: str | None, first: bool) -> int:
    """Run the conformance suite on an installed plugin or a project folder.

    Checks of capabilities that the manifest does not declare are skipped; a plugin that declares
    neither training, merging nor loading does not pass. The plugin runs in a child process, on tiny
    models, without network; a disabled plugin is checked, too. At the time limit, or when this
    command ends, all its processes are killed. --json lists every check, the passed ones too.
    """
    id, outcomes = run_suite(target, timeout or LIMIT_S, only=only, first=first)
    failed = [each for each in outcomes if each.status == "failed"]
    lack = None if only or (first and failed) else unshown(outcomes)
    if as_json:
        print_json({"id": id, "ok": not (failed or lack), "checks": outcomes})
    else:
        _print_table(id, outcomes)
    if lack:
        click.echo(f"{id}: {lack}", err=True)
    return 1 if failed or lack else 0


def _print_table(id: str, outcomes: Sequence[Outcome]) -> None:
    """Print the skipped checks by reason, each failed one, and the numbers of all."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for each in outcomes:
        if each.status == "skipped":
            reasons[each.detail].append(each.check)
    failed = [each for each in outcomes if each.status == "failed"]
    print_columns(
        (
            "skipped",
            f"{len(checks)}",
            f"{reason} ({', '.join(checks)})" if len(checks) < 3 else reason,
        )
        for reason, checks in reasons.items()
    )
    print_columns((each.status, each.check, each.detail) for each in failed)
    count = sum(map(len, reasons.values()))
    passed = len(outcomes) - count - len(failed)
    click.echo(f"{id}: {passed} passed, {count} skipped, {len(failed)} failed")
