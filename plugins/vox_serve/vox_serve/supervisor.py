"""The process of the command, which starts a worker that serves, and another when that is killed.

The listening socket outlives the worker. When a signal kills a worker (the system has no memory
left, a driver crashes, `kill -9`), the connections of its clients end at once, and requests that
come before the next one has loaded the model wait. A worker that ends by itself, or before it has
served, ends the server with its exit code. The worker is the same command again; a socket pair
tells the supervisor that it serves, and the worker that the supervisor has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from select import select
from threading import Thread

_WORKER = "_VOX_SERVE_WORKER"
"""In a worker: the file descriptors of the listening socket and of its end of the pair."""
log = logging.getLogger("vox_serve")


def is_needed() -> bool:
    """Whether this process should supervise workers; one alone serves where no worker can inherit
    a socket."""
    return _WORKER not in os.environ and os.name == "posix"


class Supervisor:
    """Keeps a worker serving on a socket that listens, until SIGTERM or SIGINT."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._ending = listener, False
        self._worker: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Return the exit code of the last worker."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        while True:
            served, code = self._run_worker()
            name = signal.Signals(-code).name if code < 0 else ""
            if not (name and served) or self._ending:
                return 128 - code if name else code
            log.error("a worker was killed by %s; starting another", name)

    def _run_worker(self) -> tuple[bool, int]:
        """Return whether a worker has served, and how it ended."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                passed = (self._listener.fileno(), theirs.fileno())
                self._worker = subprocess.Popen(
                    [sys.executable, *sys.orig_argv[1:]],
                    env={**os.environ, _WORKER: "{} {}".format(*passed)},
                    pass_fds=passed,
                    start_new_session=True,  # Ctrl-C comes from here, once
                )
                if self._ending:  # the signal came before there was this worker
                    self._worker.terminate()
            return bool(ours.recv(1)), self._worker.wait()

    def _pass_on(self, number: int, _frame: object) -> None:
        self._ending = True
        if self._worker:
            self._worker.send_signal(number)


def inherited() -> tuple[socket.socket, Callable[[], object]] | None:
    """Return a worker's listening socket, and what to call once it serves; None: this process is no
    worker. The worker gets SIGTERM when its supervisor ends."""
    if not (given := os.environ.pop(_WORKER, "")):
        return None
    listening, pair = map(int, given.split())
    line = socket.socket(fileno=pair)

    def end_with_supervisor() -> None:
        select([line], [], [])  # recv would fail if the supervisor had not read what we sent
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=end_with_supervisor, daemon=True).start()
    return socket.socket(fileno=listening, proto=socket.IPPROTO_TCP), lambda: line.send(b"1")
