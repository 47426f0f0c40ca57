"""Run folders: where they are, whether a process works in one, and what each tells.

A lock is asked for shared, and given back at once: the file stays as it is, and of two that look
neither disturbs the other.
"""

from __future__ import annotations

import os
from pathlib import Path

from vox_core.errors import AdapterError
from vox_core.run.folder import (
    CHECKPOINTS,
    LOCK,
    MANIFEST,
    PLAN,
    TELEMETRY,
    RunFolder,
    numbered,
    step_of,
)
from vox_core.run.history.summary import Status, Summary, Tally
from vox_core.run.lines import Lines

RUNS = Path("runs")


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, or the folder itself if it is one; by name.

    Raises:
        AdapterError: A001, there is no such folder.
    """
    if is_run(folder):
        return [folder]
    try:
        return sorted(each for each in folder.iterdir() if is_run(each))
    except OSError as error:
        raise _no_run(folder, error.strerror or error) from error


def is_run(folder: Path) -> bool:
    """Whether vox has begun a run there."""
    try:
        return (folder / TELEMETRY).is_file() or (folder / PLAN).is_file()
    except OSError:
        return False


def require_run(folder: Path) -> Path:
    """The folder, if it is that of a run.

    Raises:
        AdapterError: A001, it is none.
    """
    if is_run(folder):
        return folder
    raise _no_run(folder, "no telemetry and no plan" if folder.is_dir() else "no such folder")


def summary_of(folder: Path) -> Summary:
    """What the folder tells of its run.

    Raises:
        AdapterError: A001, it is no run, or its telemetry cannot be read.
    """
    lines, tally = Lines(require_run(folder) / TELEMETRY), Tally(str(folder))
    # In this order: a process that ends in between has told of its end.
    worked_in = is_worked_in(folder)
    tally.add(lines.new())
    return completed(tally, lines, folder, worked_in)


def completed(tally: Tally, lines: Lines, folder: Path, worked_in: bool) -> Summary:
    """The summary of a tally with what only the folder knows."""
    summary = tally.summary
    running: Status = "running" if worked_in else "died"
    summary.status = tally.outcome or running
    summary.checkpoints = sorted(_checkpoints(folder))
    summary.passed_over = lines.passed_over
    if summary.status in ("done", "stopped"):  # of a run at work it is what an earlier stop left
        summary.adapter_step = _adapter_step(folder)
    total = summary.total_steps
    summary.early = summary.status == "done" and total is not None and summary.step < total
    return summary


def _adapter_step(folder: Path) -> int | None:
    if not (folder / MANIFEST).is_file():  # a pipe in its place would never end
        return None
    try:
        step = RunFolder(folder).read(MANIFEST).get("step")
    except (AdapterError, RecursionError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def is_worked_in(folder: Path) -> bool:
    """Whether a process holds the folder's lock."""
    import fcntl

    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False


def _checkpoints(folder: Path) -> list[int]:
    try:
        return [step_of(each) for each in numbered(folder / CHECKPOINTS) if each.is_dir()]
    except OSError:
        return []


def _no_run(folder: Path, found: object) -> AdapterError:
    return AdapterError(
        "A001",
        "this is not a run folder of vox",
        where=folder,
        found=found,
        expected="a folder that `vox train` made",
        remedy="name a run folder; they lie under runs/ unless --out said otherwise",
    )
