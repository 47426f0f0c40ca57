"""One rank of a run, as a process that a launcher has started.

    python -m vox_core.cli.rank FOLDER ALIVE BEATS train ...

The rank runs a `vox` command and records its end in FOLDER: `rank-K.json` has the exit code and the
error, if there was one; the launcher prints it. Once a second the rank writes a byte to the
descriptor BEATS. When ALIVE is closed, the launcher has died: the rank stops after its step, or
after 15 seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from vox_core import files
from vox_core.cli import failures, prepare, root
from vox_core.errors import StorageError, VoxError
from vox_core.host.load import LAUNCHED

SECONDS_ALONE = 15.0
"""Seconds to stop in after the launcher has died."""


def main(folder: str, alive: str, beats: str, *arguments: str) -> None:
    """Run a command as a rank."""
    os.environ[LAUNCHED] = "1"
    threading.Thread(target=_beat, args=(int(alive), int(beats)), daemon=True).start()
    prepare()
    errors = list[VoxError]()
    code = failures.run(root, arguments, report=errors.append)
    _record(Path(folder), int(os.environ["RANK"]), code, errors)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a library, such as MLX's ring, may wait for other ranks for ever


def _record(folder: Path, rank: int, code: int, errors: Sequence[VoxError]) -> None:
    """Write the end of this rank for the launcher; without it the rank counts as dead."""
    kind = type(errors[0]).__name__ if errors else None
    error = {**failures.describe(errors[0]), "kind": kind} if errors else None
    with contextlib.suppress(StorageError):
        files.write_json(folder / f"rank-{rank}.json", {"exit": code, "error": error})


def _beat(alive: int, beats: int) -> None:
    """Beat until the launcher dies, and end this process then."""
    with contextlib.suppress(OSError):
        while not select.select([alive], [], [], 1.0)[0]:
            os.write(beats, b".")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_ALONE)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
