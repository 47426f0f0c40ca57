"""The question before something is done, and what becomes of it where nobody can answer."""

from __future__ import annotations

import sys

import click

from vox_core.errors import InputError


def require_agreement(question: str, yes: bool) -> None:
    """Ask on the terminal, unless `yes` was said beforehand.

    Raises:
        InputError: I012, there is no terminal to ask on.
        click.Abort: the answer is no.
    """
    if yes:
        return
    if not _somebody_is_there():
        raise InputError(
            "I012",
            "the plan needs confirmation, and there is no terminal",
            remedy="look at the plan and run again with --yes",
        )
    click.confirm(question, abort=True, err=True)


def _somebody_is_there() -> bool:
    return sys.stdin.isatty()
