"""`vox export`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vox_core.api.commands import (
    Command,
    counted,
    json_option,
    megabytes,
    options_of,
    print_json,
    print_table,
    printable,
    settings_from,
)
from vox_core.api.progress import display
from vox_core.errors import command
from vox_export.settings import ExportSettings

if TYPE_CHECKING:
    from vox_export.convert import ConvertReport
    from vox_export.export import ExportReport
    from vox_export.quality import Quality

NAMES = {"peft": "PEFT", "mlx": "mlx-lm"}


@click.command(
    "export",
    cls=Command,
    params=[
        click.Argument(["run"], metavar="RUN|MODEL"),
        *options_of(ExportSettings),
        json_option(),
    ],
    epilog="Example: vox export runs/support --to ollama --quant q8_0",
)
def export(run: str, as_json: bool, **flags: Any) -> ExportReport | ConvertReport:
    """Export a run or a model for other programs, and verify the result.

    \b
    gguf       the model, or base + adapter, as one GGUF file, for llama.cpp, LM Studio, Jan
    ollama     the same with a Modelfile, for `ollama create`
    gguf-lora  the adapter alone as GGUF, for llama.cpp's --lora
    mlx        base + adapter, merged, as a folder for mlx-lm
    mlx-lora   the adapter alone for mlx-lm
    peft       the adapter alone for PEFT; a run folder already is that, for vLLM too

    A GGUF file is compared with the original on rows of the run before it appears: by llama.cpp
    if that is installed, else by vox's own reader.
    """
    settings = settings_from(ExportSettings, flags)
    from vox_export.export import export as run_export

    with display() as shown:
        report: Any = run_export(run, settings, observe=shown.observe, progress=shown.transfer)
    if as_json:
        print_json(report)
        return report  # type: ignore[no-any-return]
    alone = settings.to in ("peft", "mlx-lora")
    print_table(_converted(report) if alone else _exported(report))
    for note in report.notes:
        click.echo(f"note: {note}")
    following = command("vox", "chat", report.out) if alone else _next(report)
    click.echo(printable(f"next: {following}"))
    return report  # type: ignore[no-any-return]


def _exported(report: ExportReport) -> dict[str, str]:
    alone = report.quality is not None and report.quality.source == "the model"
    return {
        "exported": str(report.file or report.out),
        "format": f"{report.format}, {report.quant}, {megabytes(report.bytes)}",
        "model" if alone else "base": report.base,
        **(_figures(report.quality) if report.quality else {}),
    }


def _figures(found: Quality) -> dict[str, str]:
    return {
        "compared": f"{found.engine} with {found.reference}, {found.positions} positions of "
        f"{found.rows}",
        "mean KL": f"{found.mean_kl:.2g} nats",
        "top-1": f"{found.top1:.1%} the same",
        "perplexity": f"{found.perplexity:.4g}, {found.source} {found.reference_perplexity:.4g}",
        "greedy": f"{found.greedy:.1%} of the tokens before the first that differs",
        **({} if found.carried is None else {"adapter": _effect(found.carried)}),
    }


def _effect(carried: float) -> str:
    lost = "; most of what training changed is lost in this format" if carried < 0.5 else ""
    return f"{carried:.1%} of its effect{lost}"


def _next(report: ExportReport) -> str:
    if report.format == "ollama":
        name = report.out.resolve().name.removesuffix("-ollama")
        return command("ollama", "create", name, "-f", report.out / "Modelfile")
    if report.format == "mlx":
        return command("mlx_lm.generate", "--model", report.out, "--prompt", "Hello")
    if report.format == "gguf-lora":
        return command("llama-server", "-m", "BASE.gguf", "--lora", report.file)
    return command("llama-server", "-m", report.file, "--jinja")


def _converted(report: ConvertReport) -> dict[str, str]:
    whole = f", {counted(report.saved, 'whole tensor')}" if report.saved else ""
    return {
        "exported": str(report.out),
        "format": f"{NAMES[report.source_format]} to {NAMES[report.format]}",
        "base": f"{report.base}, {counted(report.modules, 'module')}{whole}",
        "update": f"differs from the source's by {report.update_error:.1e} of its size at most",
        "logits": _logits(report),
    }


def _logits(report: ConvertReport) -> str:
    same = report.logits
    if same is None:
        return f"not compared: {report.why_no_logits}"
    first, second = same.backends
    return (
        f"{first} and {second} differ by {same.max_difference:.1e} at most "
        f"({same.relative:.1e} of their size) at {same.positions} positions"
    )
