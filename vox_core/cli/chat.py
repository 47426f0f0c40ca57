"""`vox chat`: read a line, stream the answer, keep both in the conversation.

    /help /reset /exit      Ctrl-D ends, Ctrl-C stops the current answer

The prompt appears on a terminal only; piped lines are answered one after the other.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click

from vox_core import library
from vox_core.cli.lazy import Command
from vox_core.cli.options import options_of
from vox_core.config import ChatSettings

PROMPT = "> "
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


@click.command(
    "chat",
    cls=Command,
    params=[click.Argument(["reference"], metavar="RUN|MODEL"), *options_of(ChatSettings)],
)
def chat(reference: str, **flags: Any) -> None:
    """Chat with a run or a model.

    RUN|MODEL is a run folder, an adapter saved by PEFT or mlx-lm, a merged folder, or a base model,
    here or on the hub (OWNER/NAME).
    /help, /reset and /exit are commands in the chat; Ctrl-C stops an answer, Ctrl-D ends.
    """
    with library.load(reference, section="chat", progress=True, **flags) as model:
        Conversation(model).hold(interactive=sys.stdin.isatty() and sys.stdout.isatty())


class Conversation:
    """A conversation with an open model."""

    def __init__(self, model: library.Model) -> None:
        self._model = model
        self.messages: list[dict[str, str]] = []

    def hold(self, *, interactive: bool) -> None:
        """Answer lines until stdin ends or a line is `/exit`."""
        if interactive:
            click.echo(f"{self._model.title}. {HELP}.", err=True)
        for line in _typed_lines() if interactive else filter(None, map(str.strip, sys.stdin)):
            if line == "/exit":
                return
            if line == "/reset":
                self.messages.clear()
                click.echo("forgotten", err=True)
            elif re.fullmatch(r"/[a-z]+", line):
                click.echo(HELP, err=True)
            else:
                self.answer(line)

    def answer(self, line: str) -> None:
        """Stream the answer. A stopped answer stays in the conversation as far as it was
        generated."""
        said: list[str] = []
        messages = [*self.messages, {"role": "user", "content": line}]
        try:
            for piece in self._model.stream(messages):
                said.append(piece)
                click.echo(piece, nl=False)
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False, err=True)
        click.echo()
        if said:
            self.messages = [*messages, {"role": "assistant", "content": "".join(said)}]


def _typed_lines() -> Iterator[str]:
    """Yield typed lines, with editing and history if Python has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is imported
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            continue
        if line:
            yield line
