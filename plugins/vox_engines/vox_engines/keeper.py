"""Keep a program running: start it, wait until it is healthy, start it again when it dies.

    Process   one process of the program, and requests to it
    Keeper    starts it, verifies it, and replaces it

The program listens on a Unix socket in a folder that only this user can open, so that no other
program can answer in its place, and requires a key that only this process has. It runs under
`minder.py`, so that no process stays behind however vox ends.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import httpx2

from vox_core.errors import BackendError, VoxError
from vox_engines import minder

LAST_WORDS = 60
"""Lines of the program's output in an error."""
START_SECONDS = 1800.0
"""Time for the program to load the model."""
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0
"""Seconds between two failed attempts to start the program again."""
_POLL = 0.1
_REQUEST_SECONDS = 600.0
_MINDER = [sys.executable, "-I", minder.__file__]
_PRIVATE = {"VOX_API_KEY"}
"""Variables that the program does not get."""
URL = "http://engine"
"""Of requests; the socket leads to the program, and not this name."""

log = logging.getLogger("vox_serve")


class Process:
    """A started program.

    Args:
        name: of the program, for errors.
        command, environment: what is started.
        socket: where it listens; a file that an earlier process left there is removed.
        key: it requires.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        socket: Path,
        key: str,
    ) -> None:
        self._name, self._socket, self._closed = name, socket, False
        socket.unlink(missing_ok=True)
        self._lines = deque[str](maxlen=LAST_WORDS)
        self._client = httpx2.Client(
            base_url=URL,
            headers={"Authorization": f"Bearer {key}"},
            timeout=_REQUEST_SECONDS,
            transport=httpx2.HTTPTransport(uds=str(socket)),
        )
        inherited = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
        self._process = subprocess.Popen(
            [*_MINDER, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**inherited, **environment},
            start_new_session=True,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_healthy(self, seconds: float = START_SECONDS) -> None:
        """Return when the program answers requests.

        Raises:
            BackendError: B004, it ended, or it does not answer in time.
        """
        deadline = monotonic() + seconds
        while not self._healthy():
            if self._ended_within(_POLL):
                raise self.error("ended before it answered a request")
            if monotonic() > deadline:
                raise self.error(f"does not answer {seconds:.0f} s after its start")

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request, return the document that answers it.

        Raises:
            BackendError: B004, there is none.
        """
        try:
            response = self._client.post(path, json=body)
            response.raise_for_status()
            return response.json()
        except (httpx2.HTTPError, ValueError) as error:
            said = error.response.text if isinstance(error, httpx2.HTTPStatusError) else error
            self._lines.append(f"{path}: {said}"[:1000])
            raise self.error("does not answer as expected") from error

    def wait(self) -> None:
        """Return when the program has ended."""
        self._process.wait()

    def error(self, what: str) -> BackendError:
        """Return the error for a program that failed, with its last words."""
        self._reader.join(1.0)
        said = "\n".join(self._lines) or "it printed nothing"
        return BackendError(
            "B004",
            f"{self._name} {what}",
            found=said,
            remedy="correct what it says; --engine-args passes options to it",
        )

    def close(self) -> None:
        """End the program and every process that it started."""
        if self._closed:
            return
        self._closed = True
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        if not self._ended_within(2 * minder.GRACE):
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with suppress(OSError):  # the minder was killed, and could not
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join()
        self._client.close()

    def _healthy(self) -> bool:
        if not self._socket.exists():
            return False
        try:
            return bool(self._client.get("/health", timeout=5.0).is_success)
        except httpx2.HTTPError:
            return False

    def _ended_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.append(line.decode(errors="replace").rstrip()[:500])


class Keeper:
    """Keeps one process of a program running until it is closed.

    Args:
        start: starts a process.
        verify: called with one that is healthy, before it gets the first request.

    Attributes:
        running: the process that answers; None while there is none.

    Raises:
        VoxError: the first start failed.
    """

    def __init__(self, start: Callable[[], Process], verify: Callable[[Process], None]) -> None:
        self._start, self._verify, self._closing = start, verify, Event()
        self.running: Process | None = self._started()
        self._thread = Thread(target=self._keep, name="vox-serve-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the program."""
        self._closing.set()
        self._latest.close()
        self._thread.join()

    def _started(self) -> Process:
        self._latest = self._start()
        try:
            if self._closing.is_set():
                raise self._latest.error("was stopped")
            self._latest.wait_until_healthy()
            self._verify(self._latest)
        except BaseException:
            self._latest.close()
            raise
        return self._latest

    def _keep(self) -> None:
        pause = FIRST_PAUSE
        while True:
            self._latest.wait()
            if self._closing.is_set():
                return
            if self.running:
                log.error("%s", self._latest.error("ended; starting it again"))
                self._latest.close()
            self.running = None
            try:
                self.running, pause = self._started(), FIRST_PAUSE
            except Exception as error:  # whatever it is, the program is tried again
                log.error("%s", error, exc_info=not isinstance(error, VoxError))
                self._closing.wait(pause)
                pause = min(2 * pause, LAST_PAUSE)
