"""Run somebody else's code in a process of its own, with a time limit, and say how it ended.

When the time is up, or this process is interrupted, it is killed together with whatever it started.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence


class Failed(Exception):
    """It gave no output; the text says what happened: `was ended by SIGSEGV`."""


def output_of(command: Sequence[str], limit_s: float, given: bytes = b"") -> bytes:
    """What `command` prints on stdout, with `given` on its stdin.

    Raises:
        Failed: it did not end in time, was ended by a signal, or exited with anything but 0.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(given, timeout=limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Failed(f"did not end in {limit_s:g} s") from None
            raise
    if process.returncode:
        raise Failed(_how(process.returncode, errors))
    return output


def _how(returncode: int, errors: bytes) -> str:
    if returncode < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"was ended by {known.get(-returncode, f'signal {-returncode}')}"
    last = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return f"failed: {last or f'exit {returncode}'}"
