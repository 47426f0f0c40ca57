"""`vox plugin new` and `check`: what the author of a plugin needs."""

from __future__ import annotations

from pathlib import Path

import click

from vox_core.api.commands import Command, json_option, print_columns, print_json, printable
from vox_core.errors import command


@click.command("new", cls=Command)
@click.argument("name")
@click.option("--id", "id", metavar="ID", help="What --backend will take.  [default: NAME]")
@click.option(
    "--bare", is_flag=True, help="Without the torch engine: every hook is yours to write."
)
@click.option(
    "--licence", metavar="SPDX", default="Apache-2.0", help="Licence.  [default: Apache-2.0]"
)
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder.  [default: NAME]"
)
def new(name: str, id: str | None, bare: bool, licence: str, out: Path | None) -> None:
    """Write the package of a new backend, which passes its own tests at once."""
    from vox_core.api.files import require_absent
    from vox_testing.scaffold import Project, render, write

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
    help="For the whole suite.  [default: 3600]",
)
def check(target: str, as_json: bool, timeout: float | None) -> int:
    """Run the conformance suite on an installed plugin, or on the project in a folder.

    Every check asks for capabilities that the manifest declares; what is not declared is skipped;
    where that is all of training, merging and loading, the plugin has not passed.
    The plugin runs in a process of its own, on tiny models, without network; one that is disabled
    is checked all the same. When the time is up, or this command ends, it is killed together with
    whatever it started.
    """
    from vox_testing.check import LIMIT_S, unshown
    from vox_testing.check import check as run_suite

    id, outcomes = run_suite(target, timeout or LIMIT_S)
    failed = [each for each in outcomes if each.status == "failed"]
    lack = unshown(outcomes)
    if as_json:
        print_json({"id": id, "ok": not (failed or lack), "checks": outcomes})
    else:
        print_columns((each.status, each.check, each.detail) for each in outcomes)
        passed = sum(each.status == "passed" for each in outcomes)
        skipped = len(outcomes) - passed - len(failed)
        click.echo(f"{id}: {passed} passed, {skipped} skipped, {len(failed)} failed")
    if lack:
        click.echo(f"{id}: {lack}", err=True)
    return 1 if failed or lack else 0
