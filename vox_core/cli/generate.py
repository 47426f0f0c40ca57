"""`vox generate`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from vox_core import library
from vox_core.cli.lazy import Command, json_option
from vox_core.cli.options import options_of, settings_from
from vox_core.cli.output import print_json
from vox_core.config import GenerateSettings
from vox_core.errors import ConfigError


@click.command(
    "generate",
    cls=Command,
    params=[
        click.Argument(["reference"], metavar="RUN|MODEL"),
        click.Argument(["prompt"]),
        *options_of(GenerateSettings),
        json_option(),
    ],
)
def generate(
    reference: str,
    prompt: str,
    config_file: Path | None,
    as_json: bool,
    **flags: Any,
) -> str:
    """Generate an answer to one prompt.

    RUN|MODEL is a run folder, an adapter saved by PEFT, a merged folder, or a base model. The
    PROMPT - reads stdin. --json prints one object per answer, each on its own line.
    """
    settings = settings_from(GenerateSettings, config_file, flags)
    _require_variety(settings)
    text = _read(prompt)
    with library.load(reference, config=config_file, progress=True, **flags) as model:
        answers = [_answered(model, text, row, as_json=as_json) for row in range(settings.n)]
    if as_json:
        for each in answers:
            print_json({"model": reference, "prompt": text, **each, "seed": settings.seed})
    return str(answers[0]["answer"])


def _answered(model: library.Model, text: str, row: int, *, as_json: bool) -> dict[str, object]:
    """Generate one answer and return its `--json` facts; without `--json`, print it as it
    streams."""
    started, said = time.perf_counter(), ""
    answer = model.stream(text, row=row)
    for piece in answer:
        said += piece
        if not as_json:
            click.echo(piece, nl=False)
    if not as_json:
        click.echo()
    return {
        "answer": said,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "finish_reason": answer.finish_reason,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _require_variety(settings: GenerateSettings) -> None:
    if settings.n > 1 and settings.temperature == 0:
        raise ConfigError(
            "C002",
            "greedy decoding gives the same answer every time",
            where="-n",
            found=f"-n {settings.n} --temperature 0",
            remedy="add --temperature 0.7, or leave -n out",
        )


def _read(prompt: str) -> str:
    """Return the prompt, or stdin without its final line end.

    Raises:
        ConfigError: C002, the prompt is empty.
    """
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError(
            "C002",
            "the prompt is empty",
            where="the prompt" if prompt != "-" else "stdin",
            remedy='vox generate RUN "…", or pipe a text into vox generate RUN -',
        )
    return text
