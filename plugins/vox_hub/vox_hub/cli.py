"""`vox push`."""

from __future__ import annotations

from typing import Any

import click

from vox_core.api.commands import (
    Command,
    json_option,
    megabytes,
    print_json,
    print_table,
    printable,
)
from vox_hub.push import Pushed, Upload
from vox_hub.push import push as push_folder

NOT_COMPARED = "not compared with training: no record of it, or no base, is here"


@click.command(
    "push",
    cls=Command,
    params=[
        click.Argument(["reference"], metavar="RUN|FOLDER"),
        click.Argument(["repository"], metavar="OWNER/NAME"),
        click.Option(["--public"], is_flag=True, help="Make the repository public."),
        click.Option(
            ["--base-model"],
            metavar="NAME",
            help="Name of an adapter's base model on the hub, if it was trained from a folder.",
        ),
        json_option(),
    ],
    epilog="Example: vox push runs/support me/support-adapter",
)
def push(reference: str, repository: str, as_json: bool, **given: Any) -> Pushed:
    """Upload a run or a model to the Hugging Face hub, and verify what arrived.

    The adapter or model goes up with its tokenizer and model card; data, checkpoints and paths of
    this machine stay here. The repository is private unless --public is given. Log in with
    `hf auth login` first.
    """
    pushed = push_folder(reference, repository, announce=_announce, **given)
    if as_json:
        print_json(pushed)
    else:
        _show(pushed)
    return pushed


def _announce(upload: Upload) -> None:
    files = f"{len(upload.files)} files, {megabytes(upload.bytes)}"
    if upload.unfinished:
        click.echo(f"the run has not ended: {upload.unfinished}", err=True)
    click.echo(printable(f"uploading {files}: {', '.join(upload.files)}"), err=True)


def _show(pushed: Pushed) -> None:
    rows = {
        "uploaded": f"{pushed.url} ({'private' if pushed.private else 'public'})",
        "commit": pushed.commit,
        "verified": f"the commit names the digests of the {len(pushed.files)} files here",
    }
    if any(name.startswith("adapter_model") for name in pushed.files):
        rows["adapter"] = "the one that training wrote" if pushed.trained else NOT_COMPARED
    if pushed.kept:
        rows["kept here"] = ", ".join(pushed.kept)
    if pushed.others:
        rows["also there"] = f"{', '.join(pushed.others)}, from before"
    print_table(rows)
