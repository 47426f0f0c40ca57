"""`vox data preview`."""

from __future__ import annotations

import os
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.cli.data_flags import SECTIONS, data_options, files_argument, with_files
from vox_core.cli.errors import describe, end_with
from vox_core.cli.lazy import Command
from vox_core.cli.options import json_option, settings_from
from vox_core.cli.output import print_json, print_table, printable
from vox_core.config import TrainSettings
from vox_core.display import display

if TYPE_CHECKING:
    from vox_core.data.preview.look import SeenRow
    from vox_core.run.data.preview import PreviewReport

_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


@click.command(
    "preview",
    cls=Command,
    params=[
        files_argument(),
        *data_options(),
        click.Option(["-n", "number"], type=click.IntRange(1), default=5, help="Rows to show."),
        click.Option(
            ["--row", "places"],
            metavar="[FILE:]LINE",
            multiple=True,
            help="Show this row instead; without FILE where there is one. Repeatable.",
        ),
        click.Option(
            ["--seed"], type=click.IntRange(0), default=0, help="Seed of the rows.  [default: 0]"
        ),
        click.Option(["--weights"], is_flag=True, help="Show the weight of what is trained."),
        click.Option(
            ["--audit", "whole"], is_flag=True, help="Audit all rows, however long it takes."
        ),
        click.Option(
            ["--html"],
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Write a page for a browser instead, which needs no network.",
        ),
        json_option(),
    ],
    sections=SECTIONS,
    epilog="Example: vox data preview train.jsonl --model smollm2-135m -n 3",
)
def preview(
    files: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    number: int,
    places: tuple[str, ...],
    seed: int,
    weights: bool,
    whole: bool,
    html: Path | None,
    **flags: Any,
) -> PreviewReport:
    """Rows as they will be trained: rendered, with what is trained marked.

    FILES are data files, as --data names them. The rows are spread over the data. Special tokens
    are shown; what is trained is green, or, where there is no colour, in ⟦brackets⟧. At the end
    stands what the audit of the masks found.
    """
    settings = settings_from(TrainSettings, config_file, with_files(files, flags))
    from vox_core.run.data.preview import preview as look

    with display() as shown:
        report = look(
            settings,
            number=number,
            seed=seed,
            places=places,
            whole=whole,
            html=html,
            progress=shown.transfer,
        )
    if as_json:
        print_json({**report.to_json(), "error": describe(report.error) if report.error else None})
    else:
        _show(report, weights)
    if report.error:
        end_with(report.error)
    return report


def _show(report: PreviewReport, weights: bool) -> None:
    colour = _colourful()
    if report.html is None:
        for row in report.shown:
            click.echo(_heading(row), color=colour)
            click.echo(_body(row, colour, weights), color=colour)
            click.echo()
    facts = {label: text for label, text in report.facts().items() if label != "error"}
    print_table(facts | ({"page": str(report.html)} if report.html else {}))
    for finding in report.findings:
        level = click.style(finding.level, fg=_COLOURS[finding.level]) if colour else finding.level
        click.echo(f"{level}: {printable(finding, lines=True)}", color=colour)


def _colourful() -> bool:
    """Whether stdout is a terminal whose user wants colours (no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def _heading(row: SeenRow) -> str:
    told = [f"{row.source}:{row.line}", row.form, f"{len(row.ids):,} tokens"]
    told += [f"{row.trained:,} trained"]
    told += [f"cut: {row.cut}"] if row.cut != "none" else []
    told += [f"dropped: {row.dropped}"] if row.dropped else []
    return printable(f"── {', '.join([*told, *row.findings])} ──")


def _body(row: SeenRow, colour: bool, weights: bool) -> str:
    if row.fault is not None:
        return f"cannot be rendered: {printable(row.fault, lines=True)}"
    special = set(row.special)
    tokens = enumerate(row.texts[: row.kept])
    runs = groupby(
        tokens, key=lambda token: (row.weights[token[0]], token[0] in special and colour)
    )
    text = "".join(
        _run("".join(text for _, text in run), weight, named, colour, weights)
        for (weight, named), run in runs
    )
    lost = len(row.ids) - row.kept
    return text + (f"\n… {lost:,} more tokens, cut away" if lost else "")


def _run(text: str, weight: float, special: bool, colour: bool, weights: bool) -> str:
    """Tokens of one weight."""
    text = printable(text, lines=True)
    told = f"{{{weight:g}}}" if weight and weights else ""
    if not colour:
        return f"⟦{text}⟧{told}" if weight else text
    style: dict[str, Any] = {"fg": "black", "bg": "green"} if weight else {}
    style |= {"bold": True} if special else {}
    style |= {"fg": "magenta"} if special and not weight else {}
    return "\n".join(_styled(line, style) for line in text.split("\n")) + told


def _styled(line: str, style: dict[str, Any]) -> str:
    """One line by itself: a background that goes over its end would colour the rest of it."""
    return click.style(line, **style) if line and style else line
