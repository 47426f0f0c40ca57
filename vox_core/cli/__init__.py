"""The `vox` command: a table of commands, and the one way in.

A command's module is imported when that command runs or shows its help, so `vox --help` costs no
more than click itself. Commands take flags to settings, call a service of `vox_core.run`,
`vox_core.models` or `vox_core.host`, and show what came of it; they decide nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import click

from vox_core.cli import errors
from vox_core.cli.lazy import Entry, LazyGroup

COMMANDS = {
    "quickstart": Entry(
        "vox_core.cli.quickstart:quickstart", "The whole way on a small model, in minutes."
    ),
    "train": Entry("vox_core.cli.train:train", "Fine-tune a model: data in, adapter out."),
    "data": Entry("vox_core.cli.data:data", "Look at data before it is trained."),
    "merge": Entry("vox_core.cli.merge:merge", "Adapter + base: a plain checkpoint, proven equal."),
    "chat": Entry("vox_core.cli.chat:chat", "Talk to a run or a model."),
    "generate": Entry("vox_core.cli.generate:generate", "Answer one prompt."),
    "model": Entry("vox_core.cli.model:model", "Models that vox knows: list, pull."),
    "plugin": Entry("vox_core.cli.plugin:plugin", "Plugins: list, info, install, remove, …"),
    "backend": Entry("vox_core.cli.backend:backend", "Installed backends: list, explain."),
    "bundle": Entry(
        "vox_core.cli.bundle:bundle", "Plugins as one file: list, build, verify, apply."
    ),
    "config": Entry("vox_core.cli.config:config", "Settings: schema, show."),
}


# How often a waiting OpenMP thread looks before it sleeps. libgomp's default looks until the other
# threads are scheduled again, which on a machine busy with something else makes a training step
# five times slower, where this one doubles it (docs/dev/performance-log.md). libgomp reads it when
# the first library that uses it is imported, so the process has to say it before.
SPIN_COUNT = "10000"


def _print_version(ctx: click.Context, option: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        from importlib.metadata import version  # costs more than all of click

        click.echo(f"vox {version('vox-ml')}")
        ctx.exit()


root = LazyGroup(
    name="vox",
    table=COMMANDS,
    help="Fine-tune Hugging Face causal language models on the hardware that is there.",
    epilog="Start with `vox quickstart`. `vox COMMAND --help` says what a command takes.",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Show the version and exit.",
        )
    ],
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `vox` and exit. Every error of every command ends here."""
    _complete_streams()
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # temporary files go, as with Ctrl-C
    sys.exit(errors.run(root, sys.argv[1:] if arguments is None else arguments))


def _complete_streams() -> None:
    """Put nothing in the place of streams that were closed when the process began (`2>&-`), or the
    next file that is opened would take their place and what is printed."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            mode, opened = ("r", os.O_RDONLY) if descriptor == 0 else ("w", os.O_WRONLY)
            if (nothing := os.open(os.devnull, opened)) != descriptor:
                os.dup2(nothing, descriptor)
                os.close(nothing)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False, encoding="utf-8"))
