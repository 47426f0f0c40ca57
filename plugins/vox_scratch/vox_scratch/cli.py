"""`vox model new`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from vox_core.api.commands import Command, json_option, print_json, print_table, printable
from vox_core.api.progress import display
from vox_core.errors import command
from vox_scratch.model import LIKE, NewModel, new_model


class Value(click.ParamType[Any]):
    """NAME=VALUE, the value as JSON or else as text."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name, equals, text = str(value).partition("=")
        if not (name and equals):
            self.fail(f"{value}: expected NAME=VALUE, such as hidden_size=256", param, ctx)
        try:
            return name, json.loads(text)
        except ValueError:
            return name, text


@click.command(
    "new",
    cls=Command,
    params=[
        click.Argument(["out"], metavar="OUT", type=click.Path(path_type=Path)),
        click.Option(
            ["--like"],
            metavar="MODEL",
            default=LIKE,
            help=f"Model whose architecture and tokenizer to take.  [default: {LIKE}]",
        ),
        click.Option(
            ["--set", "values"],
            type=Value(),
            metavar="NAME=VALUE",
            multiple=True,
            help="Another value in config.json: hidden_size=256. Repeatable.",
        ),
        click.Option(
            ["--data"],
            metavar="PATH",
            multiple=True,
            type=click.Path(path_type=Path),
            help="Train a tokenizer on this data instead of taking the model's. Repeatable.",
        ),
        click.Option(
            ["--vocab"],
            metavar="N",
            type=click.IntRange(min=1),
            help="Tokens of that tokenizer.  [default: as many as the model's]",
        ),
        click.Option(
            ["--seed"],
            type=click.IntRange(0, 2**63 - 1),
            metavar="N",
            default=42,
            help="Seed of the weights.  [default: 42]",
        ),
        json_option(),
    ],
    epilog="Example: vox model new tiny --set hidden_size=256 --data train.txt --vocab 8192",
)
def new(out: Path, values: tuple[tuple[str, Any], ...], as_json: bool, **given: Any) -> NewModel:
    """Make a model with random weights, to train from scratch.

    OUT is a new folder in Hugging Face's layout, with float32 weights and without a chat template.
    """
    if given["data"]:
        click.echo("training a tokenizer on the data …", err=True)
    with display() as shown:
        made = new_model(out, values=dict(values), progress=shown.transfer, **given)
    if as_json:
        print_json(made)
    else:
        _show(made, given["data"], given["vocab"])
    return made


def _show(made: NewModel, data: tuple[Path, ...], asked: int | None) -> None:
    density = f", {made.bytes_per_token:.2f} bytes per token" if made.bytes_per_token else ""
    if asked and made.vocabulary < asked:
        density += "; the data has no more pairs to merge"
    print_table(
        {
            "written": str(made.path),
            "architecture": f"{made.model_type}, like {made.like}",
            "parameters": f"{made.parameters:,}",
            "vocabulary": f"{made.vocabulary:,} tokens{density}",
        }
    )
    rows = [str(path) for path in data] or ["train.jsonl"]
    train = command("vox", "train", *rows, "--model", made.path, "--method", "full", "--lr", "1e-3")
    click.echo(printable(f"next: {train}"))
