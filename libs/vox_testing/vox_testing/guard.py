"""Run a command that may hang, so that nothing of it outlives this process.

Between the two stands a guard, a process of the standard library alone, which leads a session of
its own and holds one end of a pipe. When the command has ended, its time is up, or this process is
gone, killed included, the guard's whole process group is killed. What starts a session of its own
escapes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# The command's stdout is stderr: stdout is for how it ended.
_GUARD = """
import os, signal, subprocess, sys, threading
def end_with_the_caller():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_the_caller, daemon=True).start()
print(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=2), flush=True)
"""


class Overdue(Exception):
    """The time is up, and the command was killed."""


def call(command: Sequence[str], limit_s: float, folder: Path, environ: Mapping[str, str]) -> int:
    """Run `command` in `folder`; what it prints goes to stderr.

    Returns:
        Its exit status; negative where a signal ended it.

    Raises:
        Overdue: it did not end in `limit_s` seconds.
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
            answer = _told(guard, limit_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # nothing of the group is left
                os.killpg(guard.pid, signal.SIGKILL)
    return int(answer or -signal.SIGKILL)


def _told(guard: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """What the guard says; nothing if somebody has killed it."""
    assert guard.stdout is not None
    with suppress(subprocess.TimeoutExpired):
        guard.wait(limit_s)
        return guard.stdout.read()
    raise Overdue
