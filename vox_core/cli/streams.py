"""Standard streams that are closed when a command begins."""

from __future__ import annotations

import os
import sys


def complete() -> None:
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
