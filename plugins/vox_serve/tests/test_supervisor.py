"""The supervisor, over a worker that answers with its process id; ended by real signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from plugins.vox_serve.tests.alphabet import SECONDS

SCRIPT = """
import os, socket, sys
from vox_serve import supervisor

if "late" in sys.argv:
    supervisor.log.error = lambda *_: os.kill(os.getpid(), 15)
if supervisor.is_needed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sys.exit(supervisor.Supervisor(listener).run())
listener, serving = supervisor.inherited()
if "unready" in sys.argv:
    os.kill(os.getpid(), 9)
if "wrong" in sys.argv:
    sys.exit(2)
serving()
while True:
    client, _ = listener.accept()
    client.sendall(f"{os.getpid()} ".encode())  # and the connection stays open
    keep = client
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The supervisor and its port."""
    process = started()
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


def connected(port: int) -> tuple[socket.socket, int]:
    """A connection that is answered, and the worker's process id."""
    client = socket.create_connection(("127.0.0.1", port), SECONDS)
    said = b""
    while not said.endswith(b" "):
        part = client.recv(16)
        assert part, "the worker ended"
        said += part
    return client, int(said)


def ended(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_killed_worker_ends_its_connections_and_another_serves(server) -> None:
    process, port = server
    client, worker = connected(port)
    with client:
        os.kill(worker, signal.SIGKILL)
        assert ended(client)
    again, other = connected(port)
    with again:
        assert other not in (worker, process.pid)
        process.terminate()
        assert ended(again)
    assert process.wait(SECONDS) == 128 + signal.SIGTERM  # this worker has no handler
    assert "killed by SIGKILL; starting another" in process.stderr.read()


def test_a_signal_between_two_workers_ends_the_next_one() -> None:
    process = started("late")
    try:
        client, worker = connected(int(process.stdout.readline()))
        with client:
            os.kill(worker, signal.SIGKILL)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def test_the_worker_ends_with_a_supervisor_that_is_killed(server) -> None:
    process, port = server
    client, _ = connected(port)
    with client:
        process.kill()
        assert ended(client)


def test_the_worker_ends_with_a_supervisor_that_had_not_read_that_it_serves() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        passed = (listener.fileno(), theirs.fileno())
        environment = {**os.environ, "_VOX_SERVE_WORKER": "{} {}".format(*passed)}
        worker = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env=environment, pass_fds=passed, stderr=subprocess.PIPE
        )
        theirs.close()
        connected(listener.getsockname()[1])[0].close()
        ours.close()
        try:
            assert worker.wait(SECONDS) == -signal.SIGTERM
        finally:
            worker.kill()
            worker.communicate()


@pytest.mark.parametrize(("how", "code"), [("wrong", 2), ("unready", 128 + 9)])
def test_a_worker_that_does_not_come_to_serve_ends_the_server(how, code) -> None:
    process = started(how)
    _, said = process.communicate(timeout=SECONDS)
    assert (process.returncode, "starting another" in said) == (code, False)


VOX = [str(Path(sys.executable).with_name("vox")), "serve", "--port", "0"]


def test_an_error_of_the_real_commands_worker_is_the_commands(tmp_path) -> None:
    done = subprocess.run(
        [*VOX, tmp_path / "nothing"],
        capture_output=True,
        text=True,
        check=False,
        timeout=10 * SECONDS,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert str(tmp_path / "nothing") in done.stderr
    assert "VOX_SERVE_WORKER" not in done.stderr


@pytest.mark.long
def test_the_real_server_returns_after_kill_9(folders) -> None:
    command = [*VOX, folders / "base", "--backend", "cpu", "--dtype", "fp32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        body = {"model": "base", "prompt": "One", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=SECONDS) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(_only_child(process.pid), signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                list(lines)
        body |= {"max_tokens": 2, "stream": False}
        again = httpx.post(f"{url}/completions", json=body, timeout=10 * SECONDS)
        assert again.status_code == 200
        process.terminate()
        assert process.wait(SECONDS) == 0


def _only_child(pid: int) -> int:
    done = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)
