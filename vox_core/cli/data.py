"""`vox data`: the group, to which plugins add commands, and `check`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.cli.errors import describe, end_with
from vox_core.cli.lazy import Command, Entry, LazyGroup, json_option
from vox_core.cli.options import data_options, files_argument, settings_from, with_files
from vox_core.cli.output import print_json, printable
from vox_core.config import TrainSettings, given
from vox_core.display import display

if TYPE_CHECKING:
    from vox_core.run.data.check import CheckReport, FileReport

FAULTY = 2
COMMANDS = {
    "check": Entry("vox_core.cli.data:check", "Report faulty rows and summarise the files."),
}
_NOT_TRAINED = {"preference": "preference (checked, and not trained)"}

data = LazyGroup(
    name="data", table=COMMANDS, path=("data",), help="Check and inspect training data."
)


@click.command(
    "check",
    cls=Command,
    params=[
        files_argument(),
        *data_options(),
        json_option(),
    ],
    epilog="Example: vox data check train.jsonl",
)
@click.pass_context
def check(
    ctx: click.Context,
    /,
    files: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Everything that is wrong with data files, and what is in them.

    FILES are data files, as --data names them. Faults are looked for in all rows, whatever is
    chosen among them. Needs no model; with --model or --template the chat template is tried on
    every row, as train would, and the masks of the rows that are chosen are audited. Exit code 2 if
    anything is wrong.
    """
    settings = settings_from(TrainSettings, config_file, with_files(files, flags))
    from vox_core.run.data.check import check as look_at

    with display() as shown:
        report = look_at(
            settings,
            with_model=not {"model", "template"}.isdisjoint(given(flags)),
            progress=shown.transfer,
        )
    if as_json:
        print_json({**report.to_json(), "error": describe(report.error) if report.error else None})
    else:
        _show(report)
    if report.error:
        end_with(report.error)
    if not report.sound:
        ctx.exit(FAULTY)
    if not as_json:
        click.echo("no problems found")
        if report.trains:
            click.echo(printable(f"next: {_train_command(ctx)}"))


def _train_command(ctx: click.Context) -> str:
    """`vox train` with the files and flags of this command."""
    words = ["vox", "train"]
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        values = value if isinstance(value, tuple) else () if value in (None, False) else (value,)
        for each in values:
            words += [param.opts[0]] if isinstance(param, click.Option) else []
            words += [str(each)] if each is not True else []
    return shlex.join(words)


def _show(report: CheckReport) -> None:
    for file in report.files:
        click.echo(printable(_file(file)))
        if file.unused:
            names = ", ".join(f"{name} ({rows})" for name, rows in file.unused.items())
            click.echo(printable(f"  not used: {names}"))
    if report.template:
        click.echo(printable(f"chat template of {report.template}: tried on every row"))
    for note in report.notes:
        click.echo(printable(f"- {note}"))
    for what, found in report.audits.items():
        click.echo(f"masks of the {what} rows: {found}")
        for finding in (*found.of_level("error"), *found.of_level("warning")):
            click.echo(printable(f"- {finding.kind.level}: {finding}", lines=True))
    if not report.faults:
        return
    click.echo(f"\n{report.faults:,} fault{_s(report.faults)}, by kind:")
    for kind, count in report.kinds.items():
        click.echo(printable(f"{count:>9,}  {kind}"))
    click.echo(f"\nthe first {len(report.first)}:" if len(report.first) > 1 else "\nthe first:")
    for fault in report.first:
        click.echo(printable(f"- {fault}"))
    click.echo(f"next: {report.next}")


def _file(file: FileReport) -> str:
    named = ((_NOT_TRAINED.get(form, form), rows) for form, rows in file.forms.items())
    forms = ", ".join(f"{rows:,} {form}" for form, rows in named) or "no rows"
    wrong = f"; {file.faulty:,} row{_s(file.faulty)} with faults" if file.faulty else ""
    side = "" if file.side == "train" else f" ({file.side})"
    return f"{file.path}{side}: {forms}{wrong}"


def _s(number: int) -> str:
    return "" if number == 1 else "s"
