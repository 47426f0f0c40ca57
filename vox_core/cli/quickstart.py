"""`vox quickstart`: train, merge and query a small model with ordinary commands.

Each step prints a command and runs it in this process. The results are kept for the summary at the
end.
"""

from __future__ import annotations

import shlex
import textwrap
import time
from pathlib import Path
from typing import Any

import click

import vox_core
from vox_core import files
from vox_core.cli import root
from vox_core.cli.lazy import Command
from vox_core.cli.output import duration, losses, print_table
from vox_core.errors import command

DATA = Path(vox_core.__file__).parent / "quickstart" / "data"
FILES = ("train.jsonl", "valid.jsonl")
MODEL = "smollm2-135m"
QUESTION = "How can I continue an interrupted run?"
"""A validation question: valid.jsonl has it; train.jsonl has it only in other words."""

# About two minutes of training on two cores. Half the default batch size and five times the default
# learning rate, because the data set is small and the model is to memorise its answers.
TRAINING = ("--epochs", "3", "--batch-size", "4", "--lr", "1e-3")
LONGEST_ANSWER = ("--max-tokens", "64")
SHOWN_CHARACTERS = 240


@click.command("quickstart", cls=Command)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("vox-quickstart"),
    help="Output folder.  [default: vox-quickstart]",
)
@click.pass_context
def quickstart(ctx: click.Context, out: Path) -> None:
    """Train, merge and chat with a small model in minutes.

    Asks a question, trains on a small data set about vox, asks again and merges. Each step prints
    the command that it runs, so you can repeat it by hand. Run it again to resume after Ctrl-C.
    """
    tour = Tour(ctx, out)
    if not tour.interrupted:
        files.require_absent(out)
    tour.go()


class Tour:
    """The steps of `vox quickstart`, with their files in the folder `out`."""

    def __init__(self, ctx: click.Context, out: Path) -> None:
        self._ctx, self._out = ctx, out
        self._run, self._merged = out / "run", out / "merged"
        written = all((out / "data" / name).is_file() for name in FILES)
        self.interrupted = written and not self._merged.exists()

    def go(self) -> None:
        """Run all steps; an error or Ctrl-C in a step ends the tour with that step's exit code."""
        began = time.perf_counter()
        _title("1. Ask a question that the training data does not contain")
        before = self._ask(MODEL)
        _title("2. Train an adapter on questions and answers about vox")
        if not self.interrupted:
            self._write_data()
        data, run = str(self._out / "data"), str(self._run)
        resume = ("--resume", "auto") if self.interrupted else ()
        flags = ("--model", MODEL, "--data", data, "--out", run, *TRAINING, *resume)
        trained = self._vox("train", *flags)
        _title("3. Ask again")
        after = self._ask(run)
        _title("4. Merge the adapter into the model")
        self._vox("merge", run, "--out", str(self._merged))
        _title(f"Done in {duration(time.perf_counter() - began)}")
        print_table(
            {
                "validation loss": losses(trained.valid_before, trained.valid_after),
                "question": QUESTION,
                "before": _shortened(before),
                "after": _shortened(after),
            }
        )
        _title("What to do next")
        chat = ("vox", "chat")
        print_table(
            {
                command(*chat, self._run): "chat with the model and its adapter",
                command(*chat, self._run, "--adapter", "none"): "the same without the adapter",
                command(*chat, self._merged): "the merged model, a Hugging Face checkpoint",
                "vox train --data FILE.jsonl": "train on your own data, in the format of "
                f"{self._out / 'data' / 'train.jsonl'}",
            }
        )

    def _ask(self, reference: str) -> str:
        return str(self._vox("generate", reference, QUESTION, *LONGEST_ANSWER))

    def _vox(self, *arguments: str) -> Any:
        """Print and run a command and return its result; exit if it returns an exit code."""
        click.secho(f"$ vox {shlex.join(arguments)}", bold=True)
        result = root.main([*arguments], prog_name="vox", standalone_mode=False)
        if isinstance(result, int):
            again = ("vox", "quickstart", "--out", self._out)
            click.echo(f"to go on with the tour: {command(*again)}", err=True)
            self._ctx.exit(result)
        return result

    def _write_data(self) -> None:
        folder = self._out / "data"
        files.make_folder(folder)
        for name in FILES:
            files.write_bytes(folder / name, (DATA / name).read_bytes())


def _title(text: str) -> None:
    click.secho(f"\n{text}", fg="cyan", bold=True)


def _shortened(answer: str) -> str:
    return textwrap.shorten(answer, SHOWN_CHARACTERS, placeholder=" …")
