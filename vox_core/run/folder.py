"""A run folder: where each file lies, and the lock that keeps a second process out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_core import disk
from vox_core.errors import AdapterError, OutputError
from vox_core.files import make_folder, require_absent, sync_folder, unwritable

PLAN = "plan.json"
PREFLIGHT = "preflight.json"
TELEMETRY = "telemetry.jsonl"
MANIFEST = "vox_adapter.json"
CARD = "README.md"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"


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

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run.

        Raises:
            AdapterError: A001, the file is missing or broken, so this is no run folder of vox.
        """
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
            if isinstance(value, dict):
                return value
            found = f"a JSON {type(value).__name__}"
        except (OSError, ValueError) as error:
            found = str(error) if self.path.is_dir() else "no such folder"
        raise AdapterError(
            "A001",
            "this is not a run folder of vox",
            where=self.path / name,
            found=found,
            expected=f"a folder that `vox train` made, with {name}",
            remedy="name a run folder; they lie under runs/ unless --out said otherwise",
        )


def default_path(model: str) -> Path:
    """`runs/MODEL-TIME`, for a run without `--out`."""
    name = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2]).strip("-.") or "model"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold the run folder for this process; the system gives it back if the process dies.

    Raises:
        OutputError: O002, O003.
    """
    from filelock import FileLock, Timeout

    make_folder(folder.path)
    lock = FileLock(folder.path / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise OutputError(
            "O003",
            "another process is working in this run folder",
            where=folder.path,
            remedy="wait until it has ended, or choose another folder with --out",
        ) from error
    try:
        yield
    finally:
        lock.release()


def claim(folder: RunFolder) -> None:
    """Make the run folder; of two processes that want it, one gets it.

    Raises:
        OutputError: O001, it is there already; O002, it cannot be made.
    """
    make_folder(folder.path.parent)
    try:
        disk.calls.mkdir(folder.path)
        with suppress(OSError):  # a parent that may not be read cannot be flushed
            sync_folder(folder.path.parent)
    except FileExistsError:
        require_absent(folder.path)
    except OSError as error:
        raise unwritable(folder.path, error) from error
