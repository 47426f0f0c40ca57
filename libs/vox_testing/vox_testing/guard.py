"""Run a command that may hang, and kill all its processes when this one ends.

A guard process, which uses the standard library only, runs the command in a new session and holds
one end of a pipe. When the command ends, exceeds its time limit, or this process ends or is killed,
the guard's whole process group is killed. Processes that start their own session escape.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# The command's stdout goes to stderr; stdout reports how it ended.
_GUARD = """
import os, signal, subprocess, sys, threading
def end_with_the_caller():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_the_caller, daemon=True).start()
print(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=2), flush=True)
"""


class Overdue(Exception):
    """The command exceeded its time limit and was killed."""


def call(command: Sequence[str], limit_s: float, folder: Path, environ: Mapping[str, str]) -> int:
    """Run `command` in `folder`; its output goes to stderr.

    Returns:
        Its exit status; negative where a signal ended it.

    Raises:
        Overdue: it took longer than `limit_s` seconds.
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env=environ,
        start_new_session=True,
    ) as guard:
        try:
            answer = _report_of(guard, limit_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # the group is gone
                os.killpg(guard.pid, signal.SIGKILL)
    return int(answer or -signal.SIGKILL)


def _report_of(guard: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """Read the guard's report; empty if the guard was killed."""
    assert guard.stdout is not None
    with suppress(subprocess.TimeoutExpired):
        guard.wait(limit_s)
        return guard.stdout.read()
    raise Overdue
