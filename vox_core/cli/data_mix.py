"""`vox data mix`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vox_core.cli.lazy import Command
from vox_core.cli.options import json_option
from vox_core.cli.output import print_columns, print_json, print_table, printable
from vox_core.display import display

if TYPE_CHECKING:
    from vox_core.run.data.mix_report import MixReport, SourceReport


@click.command(
    "mix",
    cls=Command,
    params=[
        click.Argument(["recipe"], metavar="MIX.TOML", type=click.Path(path_type=Path)),
        click.Option(
            ["--out"],
            metavar="FILE",
            type=click.Path(path_type=Path),
            required=True,
            help="JSONL file to make; its report is beside it, as FILE.mix.json.",
        ),
        click.Option(
            ["--force"], is_flag=True, help="Make it anew, whatever is in its place already."
        ),
        json_option(),
    ],
    epilog="Example: vox data mix mix.toml --out train.jsonl",
)
def mix(recipe: Path, out: Path, force: bool, as_json: bool) -> MixReport:
    """Mix rows of several files into one, in the proportions of MIX.TOML.

    The same recipe and the same files give the same bytes. What is up to date is not made again.
    """
    from vox_core.run.data.mix import mix as make_mixture

    with display() as shown:
        report = make_mixture(recipe, out, force=force, progress=shown.transfer)
    if as_json:
        print_json(report)
    else:
        _show(report, out)
    return report


def _show(report: MixReport, out: Path) -> None:
    print_columns([("source", "rows", "taken", "asked", "share", "left out"), *_rows(report)])
    done = "made" if report.fresh else "up to date, nothing written"
    print_table(
        {
            "mixture": f"{out}: {report.rows:,} rows, {report.bytes / 1e6:,.1f} MB; {done}",
            "fingerprint": report.fingerprint,
        }
    )
    for fault in report.faults:
        click.echo(printable(f"left out: {fault}"), err=True)


def _rows(report: MixReport) -> Iterator[tuple[str, ...]]:
    for source in report.sources:
        yield (
            source.path,
            f"{source.rows:,}",
            _taken(source),
            "" if source.asked is None else f"{source.asked:.2%}",
            f"{source.share:.2%}",
            ", ".join(f"{count:,} {reason}" for reason, count in source.left_out.items()),
        )


def _taken(source: SourceReport) -> str:
    return f"{source.taken:,}" + (f" + {source.repeated:,} again" if source.repeated else "")
