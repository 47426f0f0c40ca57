"""The launcher `ray`: run a command's ranks as workers of Ray Train, and return their result.

    RAY_ADDRESS           the cluster at that address
    none, but `ray start` the cluster on this machine
    neither               a cluster on this machine for this run alone, gone after it

Ray's `TorchTrainer` starts one worker per rank, and all of them again after one was lost. The
command here prints what rank 0 prints, passes signals on, and trusts the ranks' records alone
(worker.py). All files of the workers are in one folder beside the run, which is removed at the end.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.api.files import storage_errors
from vox_core.api.host import cpus
from vox_core.contract import LaunchJob, LaunchResult
from vox_core.errors import BackendError, ConfigError, OutputError, TrainingError, VoxError
from vox_core.hookspecs import hookimpl
from vox_plan.launch import IMPATIENCE, error_of, passed_on
from vox_ray.worker import (
    LONELY,
    LOST,
    LOST_WORKERS,
    SIGNALS,
    STOPPED,
    Task,
    Unseen,
    attempts,
    cause,
    codes,
    note_lost,
    records,
    wait_for_ends,
    work,
)

if TYPE_CHECKING:
    from vox_core.api.plans import TrainSettings

_POLL = 0.2
_PATIENCE = 10.0
"""Seconds to wait for an address to answer."""
_SILENCE = 10
"""Seconds that a worker may take to answer Ray. It does nothing but watch its rank."""


@hookimpl
def vox_launch(job: LaunchJob, settings: TrainSettings) -> LaunchResult:
    """Run a job's ranks as workers of Ray Train.

    Raises:
        VoxError: what a rank has recorded; C004, no run folder is named, or the cluster lacks CPUs;
            B003, Ray is not installed; B004, it does not start, or not answer; O002, a worker does
            not see the run's folder; T006, ranks were lost more often than `--max-restarts`.
    """
    run = _run_of(settings)
    _require_ray()
    with ExitStack() as stack:
        folder = stack.enter_context(_folder_beside(run))
        stack.callback(_wait_for_the_last, folder, job.processes)  # once Ray has ended its workers
        stack.enter_context(_cluster())
        again = () if settings.resume else ("--resume", "auto")
        task = Task(
            arguments=job.arguments,
            again=(*job.arguments, *again),
            processes=job.processes,
            run=run,
            folder=folder,
            cwd=Path.cwd(),
            threads=threads_for(_nodes(), job.processes, os.environ.get("OMP_NUM_THREADS", "")),
            resume=job.resume,
        )
        return _run(task, settings.max_restarts)


def _run_of(settings: TrainSettings) -> Path:
    """Return the run's folder, which the ranks have to find again."""
    named = settings.out if settings.resume in (None, "auto") else settings.resume
    if named is None:
        raise ConfigError(
            "C004",
            "processes that are started again have to find their run",
            where="--launcher ray",
            expected="--out",
            remedy="name the run folder with --out, on storage that every node of the cluster sees",
        )
    return Path(named).absolute()


def _require_ray() -> None:
    try:
        import ray.train.torch  # noqa: F401
    except ImportError as error:
        raise BackendError(
            "B003",
            "the launcher ray needs Ray Train",
            found=str(error),
            remedy='vox plugin install ray, or pip install "ray[train]"',
        ) from error


@contextmanager
def _folder_beside(run: Path) -> Iterator[Path]:
    """Make the folder that all workers see, and remove it."""
    parent = next(each for each in run.parents if each.is_dir())
    with storage_errors(parent):
        made = tempfile.mkdtemp(prefix=".vox-ray-", dir=parent)
    try:
        (Path(made) / SIGNALS).touch()
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _wait_for_the_last(folder: Path, processes: int) -> None:
    for last in attempts(folder)[-1:]:
        wait_for_ends(last, processes, LONELY)


# --- the cluster ----------------------------------------------------------------------------------


@contextmanager
def _cluster() -> Iterator[None]:
    """Connect to a cluster, or start one on this machine and end it."""
    import ray

    given = os.environ.get("RAY_ADDRESS", "auto")
    with ExitStack() as stack:
        try:
            if given not in ("auto", "local"):
                _require_answer(given)
            if given != "local":
                ray.init(given, **_QUIET)
        except Exception as error:
            if given != "auto" or not isinstance(error, ConnectionError):
                raise _no_cluster(given, error) from error
        if not ray.is_initialized():
            _start_cluster(stack)
        stack.callback(ray.shutdown)
        yield


def _require_answer(address: str) -> None:
    """Connect to an address once: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError("not HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}


def _start_cluster(stack: ExitStack) -> None:
    """Start a cluster for this run alone; its files go with `stack`."""
    import ray

    folder = tempfile.mkdtemp(prefix="vox-ray-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # else Ray reports to its authors
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray keeps one in ~/.ray
    try:
        ray.init("local", num_cpus=cpus(), include_dashboard=False, _temp_dir=folder, **_QUIET)
    except Exception as error:
        ray.shutdown()
        raise _no_cluster("local", error) from error


def _no_cluster(address: str, error: Exception) -> BackendError:
    return BackendError(
        "B004",
        "the Ray cluster cannot be used",
        where=f"RAY_ADDRESS={address}",
        found=" ".join(str(error).split())[:400],
        remedy="see `ray status`; set RAY_ADDRESS to HOST:PORT of a running cluster, or to local "
        "for one on this machine",
    )


def _nodes() -> list[int]:
    """Return the CPUs of each node."""
    import ray

    return [int(each["Resources"].get("CPU", 0)) for each in ray.nodes() if each["Alive"]]


def threads_for(nodes: Sequence[int], processes: int, given: str = "") -> int:
    """Return the CPUs of each rank: as many as nodes of so many CPUs have for every rank.

    Args:
        given: `OMP_NUM_THREADS`.

    Raises:
        ConfigError: C002, there are not enough.
    """
    tried = [int(given)] if given.isdecimal() else range(max(nodes, default=0), 0, -1)
    for threads in filter(None, tried):
        if sum(cpus // threads for cpus in nodes) >= processes:
            return threads
    least = int(given) if given.isdecimal() else 1
    able = sum(cpus // max(1, least) for cpus in nodes)
    raise ConfigError(
        "C002",
        "the cluster has too few CPUs for the processes",
        where=f"--processes {processes}",
        found=f"nodes of {', '.join(map(str, nodes))} CPUs",
        expected=f"{least} for each process" + (" (OMP_NUM_THREADS)" if given else ""),
        remedy=f"use --processes {able}, or add nodes" if able else "add nodes",
    )


# --- the run --------------------------------------------------------------------------------------


def _run(task: Task, max_restarts: int) -> LaunchResult:
    """Run Ray's trainer to its end, and show meanwhile what rank 0 prints."""
    failures = list[Exception]()

    def fit() -> None:
        try:
            _trainer(task, max_restarts).fit()
        except Exception as error:  # noqa: BLE001 - whatever Ray raises
            failures.append(error)

    # In the main thread, Ray would catch Ctrl-C itself.
    trainer, shown = threading.Thread(target=fit, daemon=True), _Shown(task, max_restarts)
    # Ray reports lost workers on stdout, which is the command's.
    with redirect_stdout(sys.stderr), passed_on([_Signals(task.folder)]) as second:
        trainer.start()
        while trainer.is_alive():
            trainer.join(_POLL)
            shown.more()
            if (began := second()) and time.monotonic() - began > IMPATIENCE:
                return LaunchResult(STOPPED)
    return _result(task, failures[0] if failures else None, max_restarts)


def _trainer(task: Task, max_restarts: int) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchConfig, TorchTrainer

    class LostWorkers(UserCallback):  # type: ignore[misc] # of a package without types
        def after_exception(
            self, run_context: object, worker_exceptions: dict[int, Exception]
        ) -> None:
            note_lost(task.folder, worker_exceptions)

    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # else a folder of the run stays on each node
    # Else ten minutes.
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", str(_SILENCE))
    return TorchTrainer(
        work,
        train_loop_config={"task": task},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=task.processes, resources_per_worker={"CPU": task.threads}
        ),
        run_config=RunConfig(
            name="vox",
            storage_path=str(task.folder / "ray"),
            failure_config=FailureConfig(max_failures=max_restarts),
            callbacks=[LostWorkers()],
        ),
    )


class _Signals:
    """Passes signals on to the workers, through a file."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / SIGNALS

    def send(self, _number: signal.Signals) -> None:
        with self._file.open("ab") as file:
            file.write(b".")


class _Shown:
    """Copies what rank 0 prints to this process's stdout and stderr, attempt by attempt."""

    def __init__(self, task: Task, max_restarts: int) -> None:
        self._task, self._restarts = task, max_restarts
        self._attempt, self._explained, self._read = 0, 0, Counter[str]()
        self._streams = (("out", sys.stdout), ("log", sys.stderr))

    def more(self) -> None:
        """Copy the new output, and say why an attempt has failed."""
        known = attempts(self._task.folder)
        while self._attempt < len(known):
            here, last = known[self._attempt], self._attempt + 1 == len(known)
            self._copy(here)
            if self._explained == self._attempt and (why := self._why(here, last)):
                self._explained += 1
                again = f"restart {self._explained} of {self._restarts}, from the newest checkpoint"
                if self._attempt == self._restarts:
                    again = "no restart is left"
                sys.stderr.write(f"{why}: {again}\n")
            if last:
                return
            self._attempt, self._read = self._attempt + 1, Counter()

    def _why(self, attempt: Path, last: bool) -> str:
        """Return why Ray starts the workers of an attempt again; empty if it does not yet."""
        if (worker := attempt / LOST_WORKERS).exists():
            return worker.read_text()
        found = records(attempt, self._task.processes)
        everywhere = len(found) == self._task.processes
        if not last or (everywhere and codes(found) == {LOST}):
            lost = culprit(found)
            return _line(lost[1]) if lost else "a worker of Ray was lost"
        return ""

    def _copy(self, attempt: Path) -> None:
        for kind, stream in self._streams:
            file = attempt / f"rank-0.{kind}"
            if file.exists():
                new = file.read_bytes()[self._read[kind] :]
                self._read[kind] += len(new)
                stream.buffer.write(new)
                stream.flush()


def _line(error: VoxError) -> str:
    return " ".join(f"{error.what} ({error.where}): {error.found}".split())


# --- the result -----------------------------------------------------------------------------------


def _result(task: Task, failure: Exception | None, max_restarts: int) -> LaunchResult:
    """Return the exit code that rank 0 has recorded, or raise the error that ended the run."""
    last = attempts(task.folder)[-1:]
    found = records(last[0], task.processes) if last else {}
    lost = culprit(found)
    if (task.folder / SIGNALS).stat().st_size and (lost is None or lost[1].code == LOST):
        return LaunchResult(STOPPED)
    worker = failure and last and (last[0] / LOST_WORKERS).exists()
    if lost and not (worker and lost[1].code == LOST):  # which the other ranks could not reach
        raise _of_rank(*lost, everywhere=len(found) == task.processes, restarts=max_restarts)
    if failure:
        raise _of_ray(failure, max_restarts, task.resume) from failure
    return LaunchResult(int(found[0]["exit"]))


def culprit(found: Mapping[int, Mapping[str, Any]]) -> tuple[int, VoxError] | None:
    """Return rank and error of the probable cause: a rank that died, then one with an error, then
    one that only lost another; None if no rank failed."""
    failed = {rank: record for rank, record in found.items() if record["error"]}

    def blame(rank: int) -> tuple[bool, bool, int]:
        record = failed[rank]
        return "died" not in record, record["error"]["code"] == LOST, rank

    if not failed:
        return None
    first = min(failed, key=blame)
    return first, error_of(failed[first])


def _of_rank(rank: int, error: VoxError, *, everywhere: bool, restarts: int) -> VoxError:
    """Return a rank's error with its place, and for a lost one with the number of restarts."""
    if error.code == LOST:
        return error.but(found=f"{error.found}; after {restarts} restarts")
    if everywhere and error.exit_code == 2:
        return error
    place = f"rank {rank}"
    return error.but(where=f"{error.where} ({place})" if error.where else place)


def _of_ray(failure: Exception, restarts: int, resume: str) -> VoxError:
    """Return the error for workers that could record none."""
    by_rank = getattr(failure, "worker_failures", {})
    causes = map(cause, by_rank.values())
    if unseen := next((each for each in causes if isinstance(each, Unseen)), None):
        host, folder = unseen.args
        return OutputError(
            "O002",
            "a worker of Ray does not see the folder of the run",
            where=Path(folder).parent,
            found=f"{host} does not have it",
            expected="storage that every node of the cluster has at the same path",
            remedy="name such a folder with --out",
        )
    rank, why = next(iter(by_rank.items()), (None, failure))
    return TrainingError(
        "T006",
        "the run's workers were lost more often than they may be",
        where=None if rank is None else f"rank {rank}",
        found=f"{restarts} restarts; the last time: {' '.join(str(why).split())[:400]}",
        remedy=f"every node needs the same vox and Ray as this machine; continue with {resume}, or "
        "allow more with --max-restarts",
    )
