"""A run folder: where each file lies, and the lock that keeps a second process out.

The lock is the system's (`.lock`), and ends with the process that holds it. `.lock.json` beside it
says who that is.

Other folders of results are held alike. A call that is interrupted is continued there: it computes
a file's lines in blocks and appends whole blocks, so that the same batches are computed as in a
call that is not.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from vox_core import bounded_json
from vox_core.errors import AdapterError, OutputError
from vox_core.files import (
    append,
    make_folder,
    storage_errors,
    sync_folder,
    unwritable,
    write_bytes,
    write_json,
)

PLAN = "plan.json"
PREFLIGHT = "preflight.json"
SKIPPED = "skipped_rows.jsonl"
TELEMETRY = "telemetry.jsonl"
MANIFEST = "vox_adapter.json"
PROBE = "probe.json"
"""Log-probabilities at the end of training (`load_proof.py`)."""
RECORD = "run.json"
"""Written with the first checkpoint: the run has to go on from one."""
CARD = "README.md"
CHECKPOINTS = "checkpoints"
EVALUATIONS = "evaluations"
MODEL = "model"
"""The result of the method `full`: a plain checkpoint."""
START = "start"
"""Copy of the adapter that training started from."""
BAD_BATCHES = "bad_batches.jsonl"
ROLLOUTS = "rollouts.jsonl"
LOCK = ".lock"
OWNER = ".lock.json"

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds to wait for a lock. Who only looks whether a run is worked in holds it for a moment."""
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})", re.ASCII)  # as a checkpoint is written


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def telemetry(self) -> Path:
        return self.path / TELEMETRY

    @property
    def model(self) -> Path | None:
        """The checkpoint that a run of the method `full` left; None if there is none."""
        folder = self.path / MODEL
        return folder if (self.path / PLAN).is_file() and folder.is_dir() else None

    def read(self, name: str) -> dict[str, Any]:
        """A JSON object of the run; A001 if the file is missing or broken."""
        try:
            value = bounded_json.read(self.path / name)
            if isinstance(value, dict):
                return value
            found = f"a JSON {type(value).__name__}"
        except (OSError, ValueError) as error:
            words = (isinstance(error, OSError) and error.strerror) or error
            found = str(words) if self.path.is_dir() else "no such folder"
        raise not_a_run(self.path / name, found)


def run_meant(name: object) -> str:
    """Return a hint if `runs/NAME` is a run, or if NAME is a folder of runs; else ""."""
    with suppress(OSError):  # of a folder that may not be entered
        if runs := sorted(Path(str(name)).glob(f"*/{PLAN}"), key=os.path.getmtime, reverse=True):
            return f"runs in it, newest first: {', '.join(str(it.parent) for it in runs[:3])}; "
    return f"did you mean runs/{name}? " if Path(f"runs/{name}", PLAN).is_file() else ""


def not_a_run(where: Path, found: object) -> AdapterError:
    meant = run_meant(str(where).removesuffix(f"/{PLAN}"))
    return AdapterError(
        "A001",
        "this is not a run folder of vox",
        where=where,
        found=found,
        expected=f"a folder that `vox train` made, with {PLAN} and {TELEMETRY}",
        remedy=f"{meant}name a run folder; they lie under runs/ unless --out said otherwise",
    )


def default_path(model: str) -> Path:
    """Return `runs/MODEL-TIME`, for a run without `--out`."""
    name = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2]).strip("-.") or "model"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def unused(run: RunFolder) -> RunFolder:
    """Return the run, or `NAME-2` and so on if another one has begun in the same second."""
    later = (run.path.with_name(f"{run.path.name}-{number}") for number in itertools.count(2))
    return RunFolder(next(path for path in itertools.chain([run.path], later) if not path.exists()))


def numbered(parent: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first: a step has one name."""
    found = [p for p in parent.glob("step-*") if _STEP.fullmatch(p.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


@contextmanager
def locked(folder: RunFolder) -> Iterator[str | None]:
    """Hold the run folder, made if need be; the system gives it back if the process dies.

    Yields:
        Who held it before and ended without giving it back, in words; None if nobody did.

    Raises:
        OutputError: O002, O003.
    """
    from filelock import FileLock, Timeout

    make_folder(folder.path)
    with suppress(OSError):  # a parent that may not be read cannot be flushed
        sync_folder(folder.path.parent)
    lock, owner = FileLock(folder.path / LOCK, timeout=PATIENCE), folder.path / OWNER
    try:
        lock.acquire()
    except Timeout as error:
        raise _held(folder) from error
    except OSError as error:
        raise unwritable(folder.path, error) from error
    try:
        left = _owner(folder) if owner.exists() else None
        since = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(owner, {"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        yield left
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def require_free(folder: RunFolder) -> None:
    """Refuse a run folder in which another process is working (O003)."""
    if is_worked_in(folder.path):
        raise _held(folder)


def is_worked_in(folder: Path) -> bool:
    """Whether a process holds the folder's lock. The lock is requested shared and released at
    once, so that two readers do not disturb one another."""
    import fcntl

    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:  # it may be a file system without locks
        return isinstance(error, BlockingIOError)
    finally:
        os.close(lock)


def _held(folder: RunFolder) -> OutputError:
    what = "another process is working in this run folder"
    remedy = "wait until it has ended, or stop it; or choose another folder with --out"
    return OutputError("O003", what, where=folder.path, found=_owner(folder), remedy=remedy)


def _owner(folder: RunFolder) -> str:
    """Who holds the folder, or held it last, in words."""
    try:
        said = json.loads((folder.path / OWNER).read_text(encoding="utf-8"))
        return f"process {int(said['pid'])} on {said['host']}, since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not said who it is"


# --- results that an interrupted call continues ---------------------------------------------------


def continued(
    path: Path, parse: Callable[[list[bytes]], T], *, block: int = 1, total: int = 0
) -> T:
    """Parse the lines of whole blocks, and then drop what follows them; create a missing file.

    Args:
        parse: refuses lines of something else, whose file stays as it is.
        total: lines of a finished file, whose last block may be shorter.
    """
    append(path, b"")
    with storage_errors(path):
        content = path.read_bytes()
    lines = content.split(b"\n")[:-1]
    if len(lines) < total:
        del lines[len(lines) - len(lines) % block :]
    found = parse(lines)
    if len(whole := b"".join(line + b"\n" for line in lines)) < len(content):
        write_bytes(path, whole)
    return found


@dataclass(frozen=True, slots=True)
class Results:
    """A kind of folder.

    Args:
        name: of the file that has everything that decides the results.
        what: the results, in words.
        expected: what has to be the same, in words.
    """

    name: str
    what: str
    expected: str

    def require_same(self, folder: Path, decides: Mapping[str, Any]) -> None:
        """Refuse a folder that `held` would refuse, as far as is known before a model is loaded.

        Args:
            decides: as far as it is known.

        Raises:
            OutputError: O001, O003.
        """
        self._compare(folder, decides)
        require_free(RunFolder(folder))

    def _compare(self, folder: Path, decides: Mapping[str, Any]) -> None:
        path = folder / self.name
        if not path.is_file():
            # A process that was killed may have left its lock, which is hidden.
            there = (
                "a file"
                if folder.is_file()
                else ", ".join(sorted(each.name for each in folder.glob("[!.]*"))[:3])
            )
            if there:
                raise self.others(folder, there)
            return
        now = json.loads(json.dumps(decides))
        try:
            found = bounded_json.read(path)
            found = {key: found[key] for key in now if key in found}
        except (OSError, ValueError, TypeError) as error:
            raise self.others(folder, f"{self.name} that cannot be read: {error}") from error
        if found != now:
            changed = [
                f"{where}: then {before}, now {after}"
                for where, before, after in bounded_json.differences(found, now)
                if not where.endswith("digest")
            ]
            raise self.others(folder, f"another {self.what}", changed)

    @contextmanager
    def held(self, folder: Path, decides: Mapping[str, Any]) -> Iterator[None]:
        """Hold a folder while the results are computed.

        Args:
            decides: all of it, with its digest.

        Raises:
            OutputError: O001, it has something else; O003, another process works in it.
        """
        self._compare(folder, decides)
        with locked(RunFolder(folder)):
            if not (path := folder / self.name).exists():
                write_json(path, decides)
            self._compare(folder, decides)
            yield

    def others(self, folder: Path, found: str, faults: Sequence[str] = ()) -> OutputError:
        """Return the error for a folder that has something else (O001)."""
        return OutputError(
            "O001",
            f"the output folder has something else than this {self.what}",
            where=folder,
            found=found,
            expected=f"the same {self.expected}, or no folder",
            faults=faults,
            remedy="choose another folder with --out",
        )
