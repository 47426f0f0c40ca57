"""`vox merge`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vox_core import library
from vox_core.cli.lazy import Command, json_option
from vox_core.cli.options import options_of
from vox_core.cli.output import counted, print_json, print_table, printable
from vox_core.config import MergeSettings
from vox_core.errors import command

if TYPE_CHECKING:
    from vox_core.run.merge import MergeReport
    from vox_core.run.proof import Proof


@click.command(
    "merge",
    cls=Command,
    params=[click.Argument(["run"]), *options_of(MergeSettings), json_option()],
)
def merge(run: str, as_json: bool, **flags: Any) -> MergeReport:
    """Merge the adapter of RUN into its base model.

    Writes a Hugging Face checkpoint and verifies it: its logits must equal those of base + adapter
    up to rounding to the output dtype. RUN is a run folder, or an adapter saved by PEFT or mlx-lm,
    here or on the hub (OWNER/NAME).
    """
    report = library.merge(run, progress=True, **flags)
    (print_json if as_json else _show)(report)
    return report


def _show(report: MergeReport) -> None:
    proof, quantised = report.proof, report.requantised
    rows = {
        "merged": str(report.out),
        "base": f"{report.base}, {counted(report.modules, 'module')} changed",
        "verified": f"logits differ from base + adapter by {proof.relative:.1e} "
        f"(allowed {proof.tolerance:.1e}), median of {proof.positions} positions",
        "adapter": f"changes the logits by {proof.adapter_effect:.1e}; {_kept(proof)}",
    }
    if proof.from_trained is not None:
        rows["trained"] = (
            f"logits differ by {proof.from_trained:.1e} from the adapter on the quantised base "
            "it was trained on"
        )
        if proof.from_trained > proof.tolerance:
            rows["trained"] += " (--onto trained-base merges into that one)"
    step = command("vox", "chat", report.out)
    if quantised and quantised.distance is None:
        unverified = "no installed backend loads it, so its logits were not verified"
        rows["quantised"] = f"{quantised.quant}; {unverified}"
        step = f"vox plugin install mlx, then {step}"
    elif quantised:
        differ = f"logits differ by {quantised.distance:.1e} from the merged model's"
        rows["quantised"] = f"{quantised.quant}; {differ}"
    print_table(rows)
    click.echo(printable(f"next: {step}"))


def _kept(proof: Proof) -> str:
    if proof.dtype == "fp32":
        return f"{proof.carried:.1%} of that is in the merged model"
    return (
        f"{proof.carried:.0%} of that survives rounding to {proof.dtype} "
        "(--dtype fp32 keeps all of it)"
    )
