"""Calls of functions in child processes: chat templates, and data that are tokenised in parallel.

A chat template is a program from a repository. transformers renders it in jinja's sandbox, which
bounds what it reaches and not what it uses, so vox renders in a child only, within limits:

- A rendering takes at most `SECONDS` of processor time; then the kernel ends the child. That also
  stops a single operation in C, which no exception would, and it does not depend on how busy the
  machine is. A template cannot wait for anything.
- A child has at most `MEMORY` of address space. macOS does not enforce this limit.

A child is a fresh interpreter that ends when its parent does. `multiprocessing` would import the
parent's main module in it, and so run a script without a `__main__` guard a second time.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection, Pipe
from threading import Lock
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

SECONDS = 10.0
"""Of processor time, for one rendering."""
MEMORY = 2 << 30
"""Of address space, in bytes, for a child."""

_inside = False


class WorkerDied(Exception):
    """The child ended before it answered, or could not be started."""


class CallFailed(WorkerDied):
    """The child died at its call: over a limit, or because the function raised."""


class Worker:
    """A process that runs one function after another.

    It starts with the first call, and again with the first call after it died.
    """

    def __init__(self) -> None:
        self._lock, self._closed = Lock(), False
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a top-level function, whose arguments and result can be pickled.

        Raises:
            WorkerDied: the child died, over a limit or because the function raised.
        """
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                self._pipe.send((SECONDS, function, args, kwargs))
                return cast(R, self._pipe.recv())
            except (EOFError, OSError) as error:
                raise self._died() from error
            except BaseException:  # the next call would get the answer to this one
                self._stop()
                raise

    def close(self) -> None:
        """End the process, from any thread; a call that waits for it raises `WorkerDied`."""
        self._closed = True
        if process := self._process:
            process.kill()
            with self._lock:
                self._stop()

    def _start(self) -> None:
        self._started = False
        self._pipe, theirs = Pipe()
        path = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_SETTINGS, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the parent, which decides what ends
            )
        if self._closed:
            self._process.kill()
        self._started = cast(bool, self._pipe.recv())

    def _stop(self) -> int:
        """The exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        self._pipe.close()
        process.kill()
        return process.wait()

    def _died(self) -> WorkerDied:
        if not self._started:
            self._stop()
            return WorkerDied(f"{sys.executable} does not start a child process")
        process = cast("subprocess.Popen[bytes]", self._process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)  # its end of the pipe closes before it is gone
        status = self._stop()
        said = f"it ended the process that renders it (exit status {status})"
        if status == -signal.SIGPROF:
            said = f"it takes more than {SECONDS:g} seconds of processor time"
        return CallFailed(said)


_PROGRAM = "import sys; from vox_core.data.worker import serve; serve(int(sys.argv[1]))"
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # each thread takes address space
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",  # the processes are the threads
}


def limited(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a top-level function in this process's own child, or here if this is a child."""
    return function(*args, **kwargs) if _inside else _own()(function, *args, **kwargs)


@contextmanager
def time_limit() -> Iterator[None]:
    """End this child if the block takes more than `SECONDS` of processor time."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@cache
def _own() -> Worker:
    worker = Worker()
    atexit.register(worker.close)
    return worker


def serve(descriptor: int) -> None:
    """Answer a `Worker` until it closes its end of the pipe. A function that raises ends it."""
    global _inside, SECONDS  # noqa: PLW0603 (a process of its own)
    _inside = True
    sys.modules["torch"] = cast(Any, None)  # transformers would import it, for three seconds
    with suppress(OSError, ValueError):  # macOS; a lower limit that is there already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with Connection(descriptor) as pipe, suppress(EOFError, ConnectionError):
        pipe.send(True)
        while True:
            SECONDS, function, args, kwargs = pipe.recv()
            pipe.send(function(*args, **kwargs))
