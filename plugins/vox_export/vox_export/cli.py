"""`vox convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.api.commands import (
    Command,
    ConvertSettings,
    json_option,
    options_of,
    print_json,
    print_table,
    printable,
    settings_from,
)
from vox_core.api.progress import display
from vox_core.errors import command

if TYPE_CHECKING:
    from vox_export.convert import ConvertReport

NAMES = {"peft": "PEFT", "mlx": "mlx-lm"}


@click.command(
    "convert",
    cls=Command,
    params=[click.Argument(["run"]), *options_of(ConvertSettings), json_option()],
)
def convert(run: str, config_file: Path | None, as_json: bool, **flags: Any) -> ConvertReport:
    """Convert the adapter of RUN to PEFT or mlx-lm.

    The result is read back and compared with the source before the folder appears. RUN is a run
    folder, or an adapter saved by PEFT or mlx-lm.

    For GGUF (llama.cpp, Ollama), merge and use llama.cpp's convert_hf_to_gguf.py.
    """
    settings = settings_from(ConvertSettings, config_file, flags)
    from vox_export.convert import convert as run_convert

    with display() as shown:
        report = run_convert(run, settings, observe=shown.observe, progress=shown.transfer)
    if as_json:
        print_json(report)
    else:
        _show(report)
    return report


def _show(report: ConvertReport) -> None:
    whole = f", {report.saved} whole tensors" if report.saved else ""
    print_table(
        {
            "converted": str(report.out),
            "format": f"{NAMES[report.source_format]} to {NAMES[report.format]}",
            "base": f"{report.base}, {report.modules} modules{whole}",
            "update": f"differs from the source's by {report.update_error:.1e} of its size at most",
            "logits": _logits(report),
        }
    )
    for note in report.notes:
        click.echo(f"note: {note}")
    click.echo(printable(f"next: {command('vox', 'chat', report.out)}"))


def _logits(report: ConvertReport) -> str:
    same = report.logits
    if same is None:
        return f"not compared: {report.why_no_logits}"
    first, second = same.backends
    return (
        f"{first} and {second} differ by {same.max_difference:.1e} at most "
        f"({same.relative:.1e} of their size) at {same.positions} positions"
    )
