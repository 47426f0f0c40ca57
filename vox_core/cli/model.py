"""`vox model`: list, pull."""

from __future__ import annotations

import click

from vox_core.cli.lazy import Group
from vox_core.cli.options import config_option, json_option
from vox_core.cli.output import megabytes, print_columns, print_json, print_table
from vox_core.cli.progress import display


@click.group("model", cls=Group)
def model() -> None:
    """Models that vox knows by a short id."""


@model.command("list", params=[config_option(exposed=False), json_option()])
def list_models(as_json: bool) -> None:
    """List the models of the catalog."""
    from vox_core.known import known

    entries = known().models.values()
    if as_json:
        print_json(list(entries))
        return
    print_columns(
        (entry.id, megabytes(entry.size), entry.licence, entry.description) for entry in entries
    )


@model.command(
    "pull",
    params=[click.Argument(["id"], metavar="ID"), config_option(exposed=False), json_option()],
)
def pull(id: str, as_json: bool) -> None:
    """Download a model, check its SHA-256 and keep it in the cache.

    ID is an id of `vox model list`, or of the Hugging Face hub (owner/name).
    """
    from vox_core.known import known
    from vox_core.models import resolve

    with display() as shown:
        local = resolve(id, progress=shown.transfer)
    entry = known().models.get(id)
    facts = {
        "id": local.id,
        "path": str(local.path),
        "sha256": entry.sha256 if entry else None,
        "revision": local.revision,
        "licence": local.licence,
        "model_type": local.model_type,
    }
    if as_json:
        print_json(facts)
    else:
        print_table({label: text for label, text in facts.items() if text})
