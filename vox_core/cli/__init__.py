"""The `vox` command: the table of core commands and the entry point `main`.

A command's module is imported when that command runs or shows its help, so `vox --help` costs no
more than click itself. Commands turn flags into settings, call the Python API or a service of the
core, and print the result.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence

import click

from vox_core import SPIN_COUNT
from vox_core.cli import failures
from vox_core.cli.lazy import Lazy, LazyGroup

COMMANDS = {
    "quickstart": Lazy(
        "vox_core.cli.quickstart:quickstart", "Train, merge and chat with a small model in minutes."
    ),
    "train": Lazy("vox_core.cli.train:train", "Fine-tune a model on your data; writes an adapter."),
    "data": Lazy("vox_core.cli:data", "Check and inspect training data."),
    "merge": Lazy(
        "vox_core.cli.merge:merge", "Merge the adapter into the base model and verify it."
    ),
    "chat": Lazy("vox_core.cli.chat:chat", "Chat with a trained adapter or a model."),
    "generate": Lazy(
        "vox_core.cli.generate:generate",
        "Generate an answer to one prompt, or to every line of a file.",
    ),
    "model": Lazy("vox_core.cli.model:model", "List and download models of the catalog."),
    "plugin": Lazy("vox_core.cli.plugin:plugin", "Install, list, check and remove plugins."),
    "backend": Lazy(
        "vox_core.cli.backends:backend", "List installed backends; explain the choice."
    ),
    "config": Lazy("vox_core.cli.config:config", "Show the settings in effect, or their schema."),
}

data = LazyGroup(name="data", table={}, path=("data",), help=COMMANDS["data"].help)
"""The group that plugins add `vox data check` and the like to."""


root = LazyGroup(
    name="vox",
    table=COMMANDS,
    help="Fine-tune Hugging Face causal language models on your own hardware.",
    context_settings={"help_option_names": ["-h", "--help"]},  # of all commands
    epilog="Start with `vox quickstart`. `vox COMMAND --help` lists a command's options.",
)
click.version_option(package_name="vox-ml", message="vox %(version)s")(root)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `vox` and exit with its code; the only handler for errors of all commands."""
    prepare()
    sys.exit(failures.run(root, sys.argv[1:] if arguments is None else arguments))


def prepare() -> None:
    _complete_streams()
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    gc.set_threshold(10_000)  # objects; with Python's default, imports take a tenth longer
    for number in (signal.SIGTERM, signal.SIGHUP):  # temporary files go, as with Ctrl-C
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(number, signal.default_int_handler)


def _complete_streams() -> None:
    """Reopen closed standard streams (`2>&-`) on /dev/null, so that the next file opened does not
    get their descriptor and receive the output."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            mode, opened = ("r", os.O_RDONLY) if descriptor == 0 else ("w", os.O_WRONLY)
            if (nothing := os.open(os.devnull, opened)) != descriptor:
                os.dup2(nothing, descriptor)
                os.close(nothing)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False, encoding="utf-8"))
