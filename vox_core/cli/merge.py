"""`vox merge`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.cli.lazy import Command
from vox_core.cli.options import backend_origin, json_option, options_of, settings_from
from vox_core.cli.output import print_json, print_table
from vox_core.cli.progress import display
from vox_core.config import MergeSettings

if TYPE_CHECKING:
    from vox_core.run.merge import MergeReport, Requantised


@click.command(
    "merge",
    cls=Command,
    params=[click.Argument(["run"]), *options_of(MergeSettings), json_option()],
)
def merge(run: str, config_file: Path | None, as_json: bool, **flags: Any) -> MergeReport:
    """Merge the adapter of RUN into its base model.

    The result is a plain Hugging Face checkpoint. Its logits are held against those of base +
    adapter before the folder appears. RUN is a run folder, or an adapter saved by PEFT.
    """
    settings = settings_from(MergeSettings, config_file, flags)
    origin = backend_origin(MergeSettings, config_file, flags)
    from vox_core.run.merge import merge as run_merge

    with display() as shown:
        report = run_merge(
            run, settings, observe=shown.observe, backend_origin=origin, progress=shown.transfer
        )
    if as_json:
        print_json(report)
    else:
        _show(report)
    return report


def _show(report: MergeReport) -> None:
    proof, quantised = report.proof, report.requantised
    print_table(
        {
            "merged": str(report.out),
            "base": f"{report.base}, {report.modules} modules changed",
            "proof": f"logits differ from base + adapter by {proof.relative:.1e} "
            f"(allowed {proof.tolerance:.1e}) at {proof.positions} positions",
            "adapter": f"changes the logits by {proof.adapter_effect:.1e}; "
            f"{proof.carried:.1%} of that is in the merged model",
            **({} if proof.from_trained is None else {"trained": _trained(proof.from_trained)}),
            **({} if quantised is None else {"quantised": _quantised(quantised)}),
        }
    )
    click.echo(f"next: vox chat {report.out}")


def _trained(distance: float) -> str:
    return (
        f"logits differ by {distance:.1e} from the adapter on the quantised base it was trained on"
    )


def _quantised(done: Requantised) -> str:
    if done.distance is None:
        return f"{done.quant}; no installed backend loads it, so its logits were not looked at"
    return f"{done.quant}; logits differ by {done.distance:.1e} from the merged model's"
