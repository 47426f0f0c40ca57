"""A worker of Ray Train: one rank of a run, as a child process that the worker watches.

The rank is a process of its own (`vox_core.cli.rank`), as under the other launchers: it records its
end, beats, and stops by itself when its worker dies. The worker raises `Lost` if the rank died,
hangs, or cannot reach another one; Ray then starts all workers again, and the ranks go on from the
newest checkpoint. Every other end is a result, and is not repeated.

All workers see one folder, beside the run. Each start of the workers is an attempt, with a folder
of its own in it:

    signals              a byte for each signal that the launcher has received
    attempt-N/rank-K.*   record, stdout and stderr of rank K (`vox_plan.launch`)
    attempt-N/store      the file through which the ranks find one another
    attempt-N/lost       the workers that Ray has lost, and how
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_core.api.files import write_json
from vox_core.api.runs import is_worked_in
from vox_core.contract import LaunchJob
from vox_core.errors import VoxError
from vox_plan.launch import (
    GRACE,
    GRACE_AT_START,
    GRACE_WITHOUT_FIRST,
    LOOPBACK_ALONE,
    Rank,
    record_of,
    variables_of,
)

LONELY = 20.0
"""Seconds within which a rank whose worker has died has ended: `SECONDS_ALONE`, and some."""
LOST = "VOX-T006"
LOST_WORKERS = "lost"
SIGNALS = "signals"
STOPPED = 130
_POLL = 0.1


class Lost(Exception):
    """A rank has died, hangs, or cannot reach another one."""


class Unseen(Exception):
    """A worker does not see the folder of the run's ranks. Its arguments: host, folder."""


@dataclass(frozen=True, slots=True)
class Task:
    """The work of every worker; Ray pickles it.

    Args:
        arguments: of the `vox` command.
        again: the same, for every attempt but the first.
        processes: number of ranks.
        run: the run folder.
        folder: seen by all workers.
        cwd: working directory of the command.
        threads: `OMP_NUM_THREADS` of a rank.
        resume: command that continues the run.
    """

    arguments: tuple[str, ...]
    again: tuple[str, ...]
    processes: int
    run: Path
    folder: Path
    cwd: Path
    threads: int
    resume: str


def work(task: Mapping[str, Task]) -> None:
    """Run the rank of this worker of Ray Train, to its end.

    Raises:
        Lost: the run's ranks have to be started again.
        Unseen: this machine does not have the folder.
    """
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    each, context = task["task"], train.get_context()
    if not each.folder.is_dir():
        raise Unseen(os.uname().nodename, str(each.folder))
    number = context.get_world_rank()
    attempt = broadcast_from_rank_zero(None if number else _begin(each))
    together = context.get_local_world_size() == each.processes
    run_rank(each, number, each.folder / f"attempt-{attempt}", together)


def _begin(task: Task) -> int:
    """Begin an attempt, after rank 0 of the one before has ended; return its number."""
    number, end = len(attempts(task.folder)), time.monotonic() + LONELY
    while is_worked_in(task.run) and time.monotonic() < end and number:
        time.sleep(_POLL)
    (task.folder / f"attempt-{number}").mkdir()
    return number


def attempts(folder: Path) -> list[Path]:
    """Return the folders of the attempts so far, in order."""
    return [folder / f"attempt-{n}" for n in range(len([*folder.glob("attempt-*")]))]


def wait_for_ends(folder: Path, processes: int, seconds: float) -> None:
    """Wait until every rank of an attempt has recorded its end, for so long at most."""
    end = time.monotonic() + seconds
    while len(records(folder, processes)) < processes and time.monotonic() < end:
        time.sleep(_POLL)


def records(folder: Path, processes: int) -> dict[int, dict[str, Any]]:
    """Return the records of an attempt's ranks that have ended."""
    found = ((rank, record_of(folder, rank)) for rank in range(processes))
    return {rank: record for rank, record in found if record is not None}


def run_rank(task: Task, number: int, folder: Path, together: bool) -> None:
    """Start a rank, watch it, and see that its end is recorded.

    Args:
        together: whether all ranks are on this machine.
    """
    if (task.folder / SIGNALS).stat().st_size:  # before it can catch any
        _write(folder, number, {"exit": STOPPED, "error": None})
        return
    environ = variables_of(folder, task.processes, str(task.threads))
    arguments = task.arguments if folder.name == "attempt-0" else task.again
    job = LaunchJob(arguments, task.processes, "ray", task.resume)
    here = LOOPBACK_ALONE if together else {}
    rank = Rank(number, job, folder, {**environ, **here}, shown=False, cwd=task.cwd)
    try:
        hung = _watch(rank, task, folder)
        ended = not rank.alive
    finally:
        rank.close()
    if rank.record is None:  # it has died, or was ended because of another's error
        silent = time.monotonic() - rank.seen
        died = _as_record(rank.error(hung), silent) if ended else {"exit": 1, "error": None}
        _write(folder, number, died)
    if LOST in codes(records(folder, task.processes)):  # perhaps of another rank's error
        wait_for_ends(folder, task.processes, GRACE)
    if codes(records(folder, task.processes)) == {LOST}:
        raise Lost


def _watch(rank: Rank, task: Task, folder: Path) -> bool:
    """Wait for a rank's end; return whether it had to be killed because it hangs."""
    signals, sent, end = task.folder / SIGNALS, 0, float("inf")
    while rank.alive and time.monotonic() < end:
        if rank.hangs():
            rank.send(signal.SIGKILL)
            rank.process.wait()
            return True
        while sent < signals.stat().st_size:
            rank.send(signal.SIGTERM)  # Ray blocks SIGINT in its workers and their children
            sent += 1
        end = min(end, _end_of_others(records(folder, task.processes)))
        time.sleep(_POLL)
    return False


def _end_of_others(found: Mapping[int, Mapping[str, Any]]) -> float:
    """Return when the ranks that go on must have ended, as under the other launchers."""
    failed = [record for record in found.values() if record["error"]]
    if not failed:
        return float("inf")
    if any(record["exit"] == 2 for record in failed):
        return time.monotonic() + GRACE_AT_START
    grace: float = GRACE - max(record.get("silent", 0.0) for record in failed)
    return time.monotonic() + (min(grace, GRACE_WITHOUT_FIRST) if 0 in found else grace)


def _as_record(error: VoxError, silent: float) -> dict[str, Any]:
    """Return the record of a rank that died; `died` separates it from a rank's own.

    Args:
        silent: seconds since its last sign of life.
    """
    parts = ("code", "what", "where", "found", "expected", "remedy")
    described = {part: getattr(error, part) for part in parts}
    found = {**described, "kind": type(error).__name__}
    return {"exit": error.exit_code, "error": found, "died": True, "silent": silent}


def _write(folder: Path, number: int, record: dict[str, Any]) -> None:
    write_json(folder / f"rank-{number}.json", record)


def codes(found: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """Return the codes of the errors in ranks' records."""
    return {record["error"]["code"] for record in found.values() if record["error"]}


def note_lost(folder: Path, failures: Mapping[int, Exception]) -> None:
    """Name the workers of the newest attempt that Ray has lost, in Ray's controller."""
    lost = [
        "the worker of rank {} was lost ({})".format(rank, str(failure).partition("\n")[0])
        for rank, failure in failures.items()
        if not isinstance(cause(failure), Lost | Unseen)
    ]
    if lost:
        # Else Ray waits half a minute for torch in a worker that hangs, before it ends all.
        os.environ["TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"] = "1"
        for newest in attempts(folder)[-1:]:
            new = newest / f"{LOST_WORKERS}.new"  # the launcher reads it at any time
            new.write_text("; ".join(lost))
            new.replace(newest / LOST_WORKERS)


def cause(failure: Exception) -> Exception:
    """Return what a worker has raised, from Ray's error."""
    found: Exception = getattr(failure, "_base_exc", failure)
    return found
