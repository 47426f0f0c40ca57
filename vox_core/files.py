"""Files that are either whole or not there.

Every file and folder that vox makes goes through this module: written under a temporary name in
the same folder, flushed to the disk, renamed into place, and the rename itself flushed. A failure
leaves what was there before. `OSError` becomes a `StorageError` here and nowhere else.

Modes follow the user's umask. Nothing here knows what the files mean.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vox_core.errors import OutputError, StorageError

_FULL = {errno.ENOSPC, errno.EDQUOT}
TEMPORARY_PREFIX = ".tmp-"


@contextmanager
def storage_errors(where: Path) -> Iterator[None]:
    """Map an `OSError` raised while working on `where` to a `StorageError`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, where) from error


def storage_error(error: OSError, where: Path) -> StorageError:
    """The `StorageError` that says what `error` means for `where`."""
    if error.errno in _FULL:
        return StorageError(
            "S001",
            "the disk is full",
            where=where,
            found=error.strerror,
            remedy="free space on that disk, or choose another one with --out, and run again",
        )
    return StorageError(
        "S002",
        "a file could not be read or written",
        where=error.filename or where,
        found=error.strerror or error,
        remedy="check the disk, and that you may read and write there",
    )


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears at `path`, whole, when the block ends without an exception."""
    temporary = _temporary_beside(path)
    with storage_errors(path):
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, atomically."""
    with atomic_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a final newline, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder that appears at `path`, whole, when the block ends without an exception.

    Yields the temporary folder to fill.

    Raises:
        OutputError: `path` exists, or its parent cannot be written.
        StorageError: an I/O error while filling it.
    """
    require_absent(path)
    temporary = _temporary_beside(path)
    make_folder(temporary)
    try:
        with storage_errors(path):
            yield temporary
            _sync_tree(temporary)
            temporary.rename(path)
            sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Make `path` and its parents.

    Raises:
        OutputError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> OutputError | StorageError:
    """What it means that the folder `path` could not be made."""
    if error.errno in _FULL:
        return storage_error(error, path)
    return OutputError(
        "O002",
        "the output folder cannot be written",
        where=path,
        found=error.strerror,
        remedy="choose a folder that you can write to, with --out",
    )


def require_absent(path: Path) -> None:
    """Refuse to write where something is already.

    Raises:
        OutputError: `path` exists.
    """
    if path.exists() or path.is_symlink():
        raise OutputError(
            "O001",
            "the output folder exists",
            where=path,
            remedy=f"choose another one with --out, or remove it: rm -r {path}",
        )


def sync_folder(path: Path) -> None:
    """Flush the folder itself, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            with Path(folder, name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(folder))


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}")
