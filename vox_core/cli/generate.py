"""`vox generate`: one prompt, or a file of many."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core import files, library
from vox_core.cli.lazy import Command, json_option
from vox_core.cli.options import DataFile, options_of, settings_from
from vox_core.cli.output import print_json
from vox_core.config import GenerateSettings
from vox_core.errors import ConfigError

if TYPE_CHECKING:
    from vox_core.run.answers import Answered
    from vox_core.run.load import Answer


@click.command(
    "generate",
    cls=Command,
    params=[
        click.Argument(["reference"], metavar="RUN|MODEL"),
        click.Argument(["prompt"], required=False),
        click.Option(
            ["--file"],
            type=DataFile(path_type=Path),
            metavar="FILE",
            help='Answer every line: {"prompt": …} or {"messages": […]}.',
        ),
        click.Option(
            ["--out"],
            type=click.Path(path_type=Path),
            help="With --file: append the answers here, and continue what is there.",
        ),
        *options_of(GenerateSettings),
        json_option(),
    ],
)
def generate(
    reference: str,
    prompt: str | None,
    file: Path | None,
    out: Path | None,
    as_json: bool,
    **flags: Any,
) -> str:
    """Generate an answer to one prompt, or to every line of a file.

    RUN|MODEL is a run folder, an adapter saved by PEFT or mlx-lm, a merged folder, or a base
    model, here or on the hub (OWNER/NAME). The PROMPT - reads stdin. --json prints one object per
    answer, each on its own line. --file prints them, too, in the order of the lines; with --out,
    the same command continues after an interruption.
    """
    settings = settings_from(GenerateSettings, flags)
    if settings.n > 1 and settings.temperature == 0:
        raise ConfigError(
            "C002",
            "greedy decoding gives the same answer every time",
            where="-n",
            found=f"-n {settings.n} --temperature 0",
            remedy="add --temperature 0.7, or leave -n out",
        )
    if file is not None:
        return _answer_file(reference, prompt, file, out, flags)
    if prompt is None:
        raise click.UsageError("missing argument 'PROMPT', or --file FILE")
    if out is not None:
        remedy = "answer the lines of a file with --file, or leave --out out"
        raise _exclusive("--out", "an answer to one prompt is printed", remedy)
    text = _read(prompt)
    with library.load(reference, progress=True, **flags) as model:
        if settings.n == 1:
            answers = [_streamed(model, text, as_json=as_json)]
        else:
            answers = _together(model, text, as_json=as_json)
    if as_json:
        for each in answers:
            print_json({"model": reference, "prompt": text, **each, "seed": settings.seed})
    return str(answers[0]["answer"])


def _streamed(model: library.Model, text: str, *, as_json: bool) -> dict[str, object]:
    """Generate one answer and return its `--json` facts; without `--json`, print it as it
    streams."""
    started, said = time.perf_counter(), ""
    answer = model.stream(text)
    for piece in answer:
        said += piece
        if not as_json:
            click.echo(piece, nl=False)
    if not as_json:
        click.echo()
    return _facts(said, answer, started)


def _together(model: library.Model, text: str, *, as_json: bool) -> list[dict[str, object]]:
    """Generate several answers at once; `seconds` is the time until each could be printed."""
    started, facts = time.perf_counter(), list[dict[str, object]]()
    for each in model.answers([text]):
        if not as_json:
            click.echo(each.answer)
        facts.append(_facts(each.answer, each, started))
    return facts


def _facts(text: str, answer: Answer | Answered, started: float) -> dict[str, object]:
    return {
        "answer": text,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "finish_reason": answer.finish_reason,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _answer_file(
    reference: str,
    prompt: str | None,
    file: Path,
    out: Path | None,
    flags: dict[str, Any],
) -> str:
    """Answer every line of `file`; return what was printed last."""
    from vox_core.run.answers import read_prompts

    if prompt is not None:
        raise _exclusive("--file", "there are prompts in the file and one beside it", "name one")
    if out is not None:
        files.require_apart(out, [("--file", file)])
        files.require_writable(out)
    prompts, last = read_prompts(file), ""
    with library.load(reference, progress=True, **flags) as model:
        for each in model.answers(prompts, out=out, progress=True):
            last = each.answer
            if out is None:
                facts = asdict(each)
                del facts["digest"]
                print_json(facts)
    if out is not None:
        click.echo(f"answers  {out}")
    return last


def _exclusive(where: str, what: str, remedy: str) -> ConfigError:
    return ConfigError("C004", what, where=where, remedy=remedy)


def _read(prompt: str) -> str:
    """Return the prompt, or stdin without its final line end; C002 if it is empty."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError(
            "C002",
            "the prompt is empty",
            where="the prompt" if prompt != "-" else "stdin",
            remedy='vox generate RUN "…", or pipe a text into vox generate RUN -',
        )
    return text
