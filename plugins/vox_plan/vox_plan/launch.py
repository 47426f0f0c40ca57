"""Start the ranks of a run on this machine, watch them, and say which one failed, and how.

Each rank is a child process in a session of its own, so that a terminal's Ctrl-C reaches the
launcher alone, which passes signals on to every rank. Rank 0 has the terminal; what the others
print is kept for an error.

The launcher trusts what a rank has recorded (`vox_core.cli.rank`). A rank that ends without a
record has died, and one without a sign of life for `SILENCE` seconds hangs: it is killed, and the
others may end by themselves until `GRACE`. A launcher that dies takes its ranks with it.

`torchrun` and `mlx` are what ranks of torch and of MLX need to find one another: variables. Neither
torchrun nor mlx.launch is run. torchrun's agent listens on every interface, and unpickles what it
receives there; mlx.launch exits with 0 if a rank has died.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from vox_core import errors
from vox_core.api.host import ENDING, cpus, handled
from vox_core.contract import LaunchJob, LaunchResult
from vox_core.errors import TrainingError, VoxError

SILENCE = 15.0
"""Seconds without a beat and without CPU time after which a rank counts as hanging. A call in C may
keep Python's lock that long, and with it the thread that beats."""
GRACE = 25.0
"""Seconds after the last sign of life of a rank that failed in which the others may end: rank 0
writes a checkpoint. All are gone after 30."""
GRACE_WITHOUT_FIRST = 5.0
"""The same, if rank 0 has ended: no other rank writes anything."""
GRACE_AT_START = 1.0
"""The same, if the failure is bad input, which every rank finds."""
IMPATIENCE = 5.0
"""Seconds after a second signal until every rank is killed."""
LOOPBACK = "127.0.0.1"
LOOPBACK_ALONE = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
"""Keeps the connections of torch's ranks on this machine."""
_POLL = 0.1
_STOPPED = 130
_WORDS, _LINES = 400, 3
"""Characters and lines of a rank's last output that an error quotes, at most."""


class Rank:
    """A rank's process.

    Args:
        environ: variables besides this process's own.
        shown: whether what the rank prints goes where this process prints; otherwise it is kept in
            `folder`.
        cwd: its working directory; None is this process's own.

    Attributes:
        seen: when it last beat or used CPU time, as `time.monotonic` counts.
    """

    def __init__(
        self,
        number: int,
        job: LaunchJob,
        folder: Path,
        environ: Mapping[str, str],
        shown: bool,
        cwd: Path | None = None,
    ) -> None:
        self.number, self._folder, self._resume = number, folder, job.resume
        alive, self._alive = os.pipe()
        self._beats, beats = os.pipe()
        os.set_blocking(self._beats, False)
        kept = () if shown else (self._file("out"), self.output)
        self._kept = [path.open("wb") for path in kept]
        stdout, stderr = self._kept or (None, None)
        module = [sys.executable, "-P", "-m", "vox_core.cli.rank"]
        try:
            self.process = subprocess.Popen(
                [*module, str(folder), str(alive), str(beats), *job.arguments],
                env={**os.environ, **environ, "RANK": str(number), "MLX_RANK": str(number)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                pass_fds=(alive, beats),
                start_new_session=True,
            )
        finally:
            os.close(alive)
            os.close(beats)
        self.seen, self._worked = time.monotonic(), ""

    def _file(self, kind: str) -> Path:
        return self._folder / f"rank-{self.number}.{kind}"

    @property
    def output(self) -> Path:
        """The file of the rank's stderr, if it is kept."""
        return self._file("log")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def record(self) -> dict[str, Any] | None:
        """Return what the rank has recorded of its end; None before, and if it died."""
        return record_of(self._folder, self.number)

    @property
    def failed(self) -> bool:
        """Whether the rank has ended with an error, or without a record."""
        if self.alive:
            return False
        record = self.record
        return record is None or record["error"] is not None

    def hangs(self) -> bool:
        """Look for a beat or CPU time; return whether the last one is too long ago."""
        beats, worked = b"", _cpu_time(self.process.pid)
        with suppress(BlockingIOError):
            beats = os.read(self._beats, 4096)
        if beats or worked != self._worked:
            self.seen, self._worked = time.monotonic(), worked
        return self.alive and time.monotonic() - self.seen > SILENCE

    def send(self, number: signal.Signals) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def close(self) -> None:
        """Kill the rank and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._alive)
        os.close(self._beats)
        for file in self._kept:
            file.close()

    def error(self, hung: bool) -> VoxError:
        """Return the error of a rank that has failed."""
        record = self.record
        if record is None or record["error"] is None:
            return self._died(hung)
        return error_of(record)

    def _died(self, hung: bool) -> TrainingError:
        code = self.process.returncode
        how = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        if hung:
            how = f"no sign of life for {SILENCE:.0f} seconds; it was killed"
        words = ""
        if self._kept:
            words = _last_lines(self.output.read_text(errors="replace"))
        return TrainingError(
            "T006",
            f"rank {self.number} of the run has {'stopped responding' if hung else 'died'}",
            where=f"rank {self.number}, process {self.process.pid} on {os.uname().nodename}",
            found=f"{how}; its last words: {words}" if words else how,
            remedy=f"continue with {self._resume}, on any number of processes; if the system "
            "killed the process, it was probably out of memory",
        )


def _last_lines(text: str) -> str:
    """Return the last lines without the repeated ones of a progress bar, at most `_WORDS` long."""
    lines = text.replace("\r", "\n").strip().splitlines()
    return "\n".join(lines[-_LINES:])[-_WORDS:]


def record_of(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return what a rank has recorded of its end; None before, and if it died."""
    try:
        found: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    except FileNotFoundError:
        return None
    return found


def error_of(record: Mapping[str, Any]) -> VoxError:
    """Return the error that a rank has recorded."""
    found = dict(record["error"])
    kind = getattr(errors, found.pop("kind"))
    made: VoxError = kind(found.pop("code").removeprefix("VOX-"), found.pop("what"), **found)
    return made


def launch(job: LaunchJob) -> LaunchResult:
    """Run a job's ranks on this machine.

    Raises:
        VoxError: what a rank has reported; T006, a rank has died or hangs.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vox-ranks-")))
        variables = _variables(job, folder)
        ranks = list[Rank]()
        signals = stack.enter_context(passed_on(ranks))
        for number in range(job.processes):
            rank = Rank(number, job, folder, variables, shown=number == 0)
            stack.callback(rank.close)
            ranks.append(rank)
        return _watched(ranks, signals)


def _variables(job: LaunchJob, folder: Path) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cpus() // job.processes)))
    variables = variables_of(folder, job.processes, threads)
    if job.launcher != "mlx":
        return {**variables, **LOOPBACK_ALONE}
    places = [[f"{LOOPBACK}:{port}"] for port in _free_ports(job.processes)]
    (folder / "hosts.json").write_text(json.dumps(places))
    return {**variables, "MLX_HOSTFILE": f"{folder}/hosts.json"}


def variables_of(folder: Path, processes: int, threads: str) -> dict[str, str]:
    """Return what every rank needs, of any launcher. Temporary files of a killed rank go with
    `folder`."""
    (folder / "temporary").mkdir(exist_ok=True)
    return {
        "TMPDIR": f"{folder}/temporary",
        "WORLD_SIZE": str(processes),
        "RENDEZVOUS_FILE": f"{folder}/store",
        "OMP_NUM_THREADS": threads,
    }


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def _cpu_time(pid: int) -> str:
    """Return the CPU time that a process has used; empty where there is no /proc."""
    with suppress(OSError):
        return " ".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
    return ""


def _watched(ranks: list[Rank], signals: Callable[[], float | None]) -> LaunchResult:
    """Wait for the end of every rank."""
    hung: Rank | None = None
    while any(rank.alive for rank in ranks):
        hung = next((rank for rank in ranks if rank.hangs()), None)
        if hung:
            hung.process.kill()
            hung.process.wait()
        if hung or any(rank.failed for rank in ranks):
            _wait_for_others(ranks, hung)
            break
        if (second := signals()) and time.monotonic() - second > IMPATIENCE:
            break
        time.sleep(_POLL)
    if signals():
        return LaunchResult(_STOPPED)
    failed = [rank for rank in ranks if rank is hung or rank.failed]
    if not failed:
        record = ranks[0].record
        assert record is not None
        return LaunchResult(int(record["exit"]))
    culprit = min(failed, key=lambda rank: _blame(rank, hung))
    error = culprit.error(culprit is hung)
    everyone = len(failed) == len(ranks) and error.exit_code == 2
    if everyone or error.code == "VOX-T006":
        raise error
    place = f"rank {culprit.number}, process {culprit.process.pid} on {os.uname().nodename}"
    raise error.but(where=f"{error.where} ({place})" if error.where else place)


def _blame(rank: Rank, hung: Rank | None) -> tuple[int, int]:
    """Order ranks by how probably they are the cause: those that only lost another come last."""
    record = rank.record
    if rank is hung:
        return 0, rank.number
    if record is None:  # killed by the launcher if it is still alive
        return 1, rank.number
    return (3 if record["error"]["code"] == "VOX-T006" else 2), rank.number


def _wait_for_others(ranks: list[Rank], hung: Rank | None) -> None:
    """Let the other ranks end: their checkpoint may be half written."""
    failed = [rank for rank in ranks if rank is hung or rank.failed]
    end = min(rank.seen for rank in failed) + GRACE
    if any((record := rank.record) and record["exit"] == 2 for rank in failed):
        end = time.monotonic() + GRACE_AT_START
    while time.monotonic() < end and any(rank.alive for rank in ranks):
        if not ranks[0].alive:
            end = min(end, time.monotonic() + GRACE_WITHOUT_FIRST)
        time.sleep(_POLL)


class Receiver(Protocol):
    """Gets the signals that a launcher gets."""

    def send(self, number: signal.Signals) -> None: ...


@contextmanager
def passed_on(ranks: Sequence[Receiver]) -> Iterator[Callable[[], float | None]]:
    """Pass SIGINT, SIGTERM and SIGHUP on to every rank; yield when the second came, or None."""
    times = list[float]()

    def pass_on(number: int, _frame: object) -> None:
        if times and number == signal.SIGHUP:  # a closed terminal sends two
            return
        times.append(time.monotonic())
        for rank in ranks:
            rank.send(signal.Signals(number))

    with handled(pass_on, *ENDING):
        yield lambda: times[1] if len(times) > 1 else None
