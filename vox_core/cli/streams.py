"""Standard streams that are closed, or go away while a command works."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

_GONE = {errno.EPIPE, errno.EIO}
"""The reader of a pipe has ended; the terminal has been closed."""


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


def abandon_stderr(error: OSError) -> bool:
    """Whether stderr is gone; if so, what is still to be written there goes nowhere."""
    if error.errno not in _GONE:
        return False
    nothing = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # a stream that is not the process's own
        os.dup2(nothing, sys.stderr.fileno())
    os.close(nothing)
    return True
