"""`vox data extract`: python, markdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.api.commands import Group, counted, json_option, print_json, print_table, printable
from vox_core.api.progress import display
from vox_core.errors import command

if TYPE_CHECKING:
    from vox_extract.extract import ExtractReport, Form

SHOWN = 5
"""Files that could not be read; `--json` has them all."""


@click.group("extract", cls=Group)
def extract() -> None:
    """Make question-answer rows from Python docstrings or Markdown files."""


def _options() -> list[click.Parameter]:
    return [
        click.Option(
            ["--out"],
            metavar="FILE",
            required=True,
            type=click.Path(path_type=Path, dir_okay=False),
            help="JSONL file to write.",
        ),
        click.Option(
            ["--limit"],
            type=click.IntRange(min=1),
            metavar="ROWS",
            help="Max rows, spread over all sources; always the same ones.",
        ),
        click.Option(
            ["--max-chars"],
            type=click.IntRange(min=100),
            default=2000,
            metavar="N",
            help="Max characters of an answer; longer ones are cut after a paragraph or left out.  "
            "[default: 2000]",
        ),
        click.Option(["--overwrite"], is_flag=True, help="Replace an existing file."),
        json_option(),
    ]


@extract.command(
    "python",
    params=[
        click.Argument(["package"], nargs=-1, required=True, metavar="PACKAGE|FOLDER..."),
        click.Option(["--private"], is_flag=True, help="Include private objects."),
        *_options(),
    ],
    epilog="Example: vox data extract python stdlib numpy --out rows.jsonl",
)
def python(package: tuple[str, ...], **given: Any) -> ExtractReport:
    """Extract rows from docstrings, signatures and examples.

    PACKAGE is `stdlib`, one of its modules, or an installed package or distribution. The name of a
    FOLDER or file contains a path separator: ./src. Sources are read, never imported. Each row
    records its source and licence.
    """
    return _extract("python", package, **given)


@extract.command(
    "markdown",
    params=[click.Argument(["folder"], nargs=-1, required=True, metavar="FOLDER..."), *_options()],
    epilog="Example: vox data extract markdown docs --out rows.jsonl",
)
def markdown(folder: tuple[str, ...], **given: Any) -> ExtractReport:
    """Extract rows from sections and code blocks.

    FOLDER is searched recursively; a single file works, too.
    """
    return _extract("markdown", folder, **given)


def _extract(
    form: Form, sources: tuple[str, ...], *, max_chars: int, as_json: bool, **given: Any
) -> ExtractReport:
    from vox_extract.extract import extract as run_extract

    with display() as shown:
        report = run_extract(
            form, sources, max_characters=max_chars, progress=shown.transfer, **given
        )
    if as_json:
        print_json(report)
    else:
        _show(report)
    return report


def _show(report: ExtractReport) -> None:
    print_table(
        {
            "written": str(report.out),
            "rows": f"{report.rows:,} from {counted(report.files, 'file')}",
            "kinds": _counts(report.kinds),
            "licence": _counts(report.licences),
            "left out": _counts(report.left_out) or "nothing",
        }
    )
    for each in report.unread[:SHOWN]:
        click.echo(printable(f"warning: not read: {each}"), err=True)
    if (more := len(report.unread) - SHOWN) > 0:
        click.echo(f"warning: … and {more} more; --json names them all", err=True)
    click.echo(printable(f"next: {command('vox', 'data', 'check', '--data', report.out)}"))


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in found.items())
