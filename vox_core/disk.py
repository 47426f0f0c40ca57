"""The calls that change what is on a disk, so that a test can put faults in.

`vox_core.files` makes every change through `calls`. A test puts another `Calls` in its place: one
that fails at the third write, that kills the process at the fourth rename, or that keeps a record
of what was flushed. Nothing here handles errors, and nothing here reads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
# Of whoever may by the user's umask.
_MODE = 0o666


class Calls:
    """The system's own calls. Each raises `OSError`."""

    def create(self, path: Path) -> int:
        """A descriptor of a file that was not there."""
        return os.open(path, _NEW | os.O_CLOEXEC, _MODE)

    def append(self, path: Path) -> int:
        """A descriptor that writes at the end, wherever that is by then."""
        return os.open(path, _APPEND | os.O_CLOEXEC, _MODE)

    def open_folder(self, path: Path) -> int:
        """A descriptor to `fsync` the folder's entries with."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def write(self, descriptor: int, data: ReadableBuffer) -> int:
        """Write some of `data`: how many bytes."""
        return os.write(descriptor, data)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Put `source` in the place of `target`, at once."""
        source.replace(target)

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rmdir(self, path: Path) -> None:
        path.rmdir()


calls = Calls()
