"""`vox push`."""

from __future__ import annotations

import click

from vox_core.api.commands import (
    Command,
    counted,
    json_option,
    megabytes,
    print_json,
    print_table,
    printable,
)
from vox_hub.push import Pushed, Upload, prepare
from vox_hub.push import push as upload_files

_OF_AN_UPLOAD = ("repository", "url", "kept", "trained", "unfinished")
NOT_COMPARED = "not compared with training: no record of it, or no base, is here"


@click.command(
    "push",
    cls=Command,
    params=[
        click.Argument(["reference"], metavar="RUN|FOLDER"),
        click.Argument(["repository"], metavar="OWNER/NAME"),
        click.Option(
            ["--public/--private"], help="Visibility of the repository.  [default: private]"
        ),
        click.Option(
            ["--base-model"],
            metavar="NAME",
            help="Name of an adapter's base model on the hub, if it was trained from a folder.",
        ),
        click.Option(
            ["--dry-run"], is_flag=True, help="List what would be uploaded, and upload nothing."
        ),
        json_option(),
    ],
    epilog="Example: vox push runs/support me/support-adapter",
)
def push(
    reference: str,
    repository: str,
    base_model: str | None,
    public: bool,
    dry_run: bool,
    as_json: bool,
) -> Pushed | Upload:
    """Upload a run or a model to the Hugging Face hub, and verify what arrived.

    The adapter or model goes up with its tokenizer and model card; data, checkpoints and paths of
    this machine stay here. The repository is private unless --public is given. Log in with
    `hf auth login` first.
    """
    upload = prepare(reference, repository, base_model)
    if upload.unfinished:
        click.echo(f"the run has not ended: {upload.unfinished}", err=True)
    if dry_run:
        _show_upload(upload, public, as_json)
        return upload
    files = f"{counted(len(upload.files), 'file')}, {megabytes(sum(upload.sizes.values()))}"
    click.echo(printable(f"uploading {files}: {', '.join(upload.files)}"), err=True)
    pushed = upload_files(upload, public=public, base_model=base_model, warn=_warn)
    if as_json:
        print_json(pushed)
    else:
        _show(pushed)
    return pushed


def _warn(text: str) -> None:
    click.echo(printable(f"warning: {text}"), err=True)


def _show_upload(upload: Upload, public: bool, as_json: bool) -> None:
    """Print what would be uploaded."""
    if as_json:
        about = {name: getattr(upload, name) for name in _OF_AN_UPLOAD}
        print_json({**about, "private": not public, "files": upload.sizes})
        return
    where = f"{upload.url} ({'public' if public else 'private'})"
    click.echo(printable(f"would upload to {where}:"))
    print_table({f"  {name}": f"{size:,} bytes" for name, size in upload.sizes.items()})
    if upload.kept:
        click.echo(printable(f"kept here: {', '.join(upload.kept)}"))


def _show(pushed: Pushed) -> None:
    rows = {
        "uploaded": f"{pushed.url} ({'private' if pushed.private else 'public'})",
        "commit": pushed.commit,
        "verified": f"the commit names the digests of {counted(len(pushed.files), 'file')} here",
    }
    if any(name.startswith("adapter_model") for name in pushed.files):
        rows["adapter"] = "the one that training wrote" if pushed.trained else NOT_COMPARED
    if pushed.kept:
        rows["kept here"] = ", ".join(pushed.kept)
    if pushed.others:
        rows["also there"] = f"{', '.join(pushed.others)}, from before"
    print_table(rows)
