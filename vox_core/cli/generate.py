"""`vox generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from vox_core.cli.lazy import Command
from vox_core.cli.options import backend_origin, json_option, options_of, settings_from
from vox_core.cli.output import print_json
from vox_core.cli.progress import display
from vox_core.config import GenerateSettings
from vox_core.errors import ConfigError

PROMPT = click.Option(["--prompt"], required=True, help="What to answer; - reads it from stdin.")


@click.command(
    "generate",
    cls=Command,
    params=[
        click.Argument(["reference"], metavar="RUN|MODEL"),
        PROMPT,
        *options_of(GenerateSettings),
        json_option(),
    ],
)
def generate(
    reference: str, prompt: str, config_file: Path | None, as_json: bool, **flags: Any
) -> str:
    """Answer one prompt.

    RUN|MODEL is a run folder, an adapter saved by PEFT, a merged folder, or a base model.
    """
    settings = settings_from(GenerateSettings, config_file, flags)
    origin = backend_origin(GenerateSettings, config_file, flags)
    text = _read(prompt)
    from vox_core.run.load import open_model

    pieces: list[str] = []
    with (
        display() as shown,
        open_model(
            reference,
            settings,
            observe=shown.observe,
            backend_origin=origin,
            progress=shown.transfer,
        ) as model,
    ):
        for piece in model.reply([{"role": "user", "content": text}]):
            pieces.append(piece)
            if not as_json:
                click.echo(piece, nl=False)
    answer = "".join(pieces)
    if as_json:
        print_json({"model": reference, "prompt": text, "answer": answer})
    else:
        click.echo()
    return answer


def _read(prompt: str) -> str:
    """The prompt, or stdin without its final line end.

    Raises:
        ConfigError: C002, there is nothing in it.
    """
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError(
            "C002",
            "the prompt is empty",
            where="--prompt" if prompt != "-" else "stdin",
            remedy='vox generate RUN --prompt "…", or pipe a text into vox generate RUN --prompt -',
        )
    return text
