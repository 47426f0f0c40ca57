"""The system calls that change the disk, behind one object that tests replace.

`vox_core.files` makes every change through `calls`. A test puts another `Calls` in its place: one
that fails at the third write, that kills the process at the fourth rename, or that keeps a record
of what was flushed. It handles no errors and reads nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
# The user's umask restricts these.
_MODE = 0o666


class Calls:
    """The system's calls; each raises `OSError`."""

    def create(self, path: Path) -> int:
        """Return a descriptor of a new file."""
        return os.open(path, _NEW | os.O_CLOEXEC, _MODE)

    def append(self, path: Path) -> int:
        """Return a descriptor that always writes at the current end of the file."""
        return os.open(path, _APPEND | os.O_CLOEXEC, _MODE)

    def open_folder(self, path: Path) -> int:
        """Return a descriptor for `fsync` of the folder's entries."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def write(self, descriptor: int, data: ReadableBuffer) -> int:
        """Write part of `data`; return the number of bytes written."""
        return os.write(descriptor, data)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` with `source`, atomically."""
        source.replace(target)

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rmdir(self, path: Path) -> None:
        path.rmdir()


calls = Calls()
