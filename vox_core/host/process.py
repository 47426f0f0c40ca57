"""Run untrusted code in a child process with limits on time and output, and report how it ended.

More than `OUTPUT_BYTES` on stdout is a fault; only the end of stderr is kept. When the process
ends, exceeds a limit, or this process is interrupted, its whole process group is killed. `handled`
changes what this process does on a signal.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

OUTPUT_BYTES = 4 * 2**20
"""Limit on stdout; answers have a few kilobytes."""
ERRORS_BYTES = 2**16
"""Bytes kept of stderr's end, where a traceback is."""
_WORDS = 500
"""Characters of stderr's last line that a message quotes."""
_CHUNK = 2**16

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: the terminal is closed


_CHILD = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['path']; "
    "from vox_core.host import child; getattr(child, request['call'])(request)"
)


class Failed(Exception):
    """A process without a valid output; the text says what happened: `was ended by SIGSEGV`."""


def child_command(call: str, plugin_id: str, **more: object) -> list[str]:
    """Return the command that calls a function of child.py for one plugin."""
    request = {"call": call, "id": plugin_id, "path": sys.path, **more}
    return [sys.executable, "-P", "-c", _CHILD, json.dumps(request)]


def output_of(command: Sequence[str], limit_s: float) -> bytes:
    """Return what `command` prints on stdout.

    Raises:
        Failed: it exceeded the time limit, printed too much, was ended by a signal, or exited with
            anything but 0.
    """
    ended = run(command, limit_s)
    if ended.returncode < 0:
        raise Failed(f"was ended by {signal_name(ended.returncode)}")
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Failed(f"failed: {last[:_WORDS] or f'exit {ended.returncode}'}")
    return ended.stdout


def run(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[bytes]:
    """Run `command` without stdin; return its exit status, its stdout, and the end of its stderr.

    Raises:
        Failed: it exceeded the time limit, or printed more than `OUTPUT_BYTES` on stdout.
    """
    until, pipe = time.monotonic() + limit_s, subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
    ) as process:
        try:
            output, errors = _heard(process, until)
            status = process.wait(_left(until))
            return subprocess.CompletedProcess(command, status, output, errors)
        except (subprocess.TimeoutExpired, TimeoutError):
            raise Failed(f"did not end in {limit_s:g} s") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):  # the process group is gone
                os.killpg(process.pid, signal.SIGKILL)


def _heard(process: subprocess.Popen[bytes], until: float) -> tuple[bytes, bytes]:
    """Read stdout and the end of stderr until both are closed."""
    output, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as open_pipes:
        for pipe, heard in ((process.stdout, output), (process.stderr, errors)):
            assert pipe is not None
            open_pipes.register(pipe, selectors.EVENT_READ, heard)
        while open_pipes.get_map():
            for key, _ in open_pipes.select(_left(until)):
                if chunk := os.read(key.fd, _CHUNK):
                    key.data.extend(chunk)
                else:
                    open_pipes.unregister(key.fileobj)
            del errors[:-ERRORS_BYTES]
            if len(output) > OUTPUT_BYTES:
                raise Failed(f"printed more than {OUTPUT_BYTES / 1e6:.0f} MB")
    return bytes(output), bytes(errors)


def _left(until: float) -> float:
    """Return the seconds left, so that endless output cannot outlast the limit."""
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


@contextmanager
def handled(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    """Install a handler for some signals within the block; in other threads than the main one, do
    nothing. SIGHUP stays ignored where it is, as under nohup."""
    mine = threading.current_thread() is threading.main_thread()
    kept = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
    taken = [number for number in signals if mine and number not in kept]
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def signal_name(returncode: int) -> str:
    """Return the name of the signal that ended a process."""
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
