"""The cache of reproducible files: converted models, row facts, tokens.

`VOX_CACHE` names the root; without it the root follows the platform (`~/.cache/vox` on Linux).
An entry of `cached` is a folder `KIND/KEY` that appears whole. An unreadable entry is a miss. An
entry unused for a month goes when another of its kind is made; all may be deleted at any time.

The hash of a large file is kept under its real path, size and times. A file changed in place has
other times and is hashed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from vox_core import files
from vox_core.errors import OutputError, StorageError, VoxError

CACHE_VERSION = 20
"""Version of everything derived from data files: rows, facts, templates, tokens. Raise it with each
change of the code that changes them: entries of another version are not used. A test compares it
with the golden tokens (`tests/golden/test_cache_version.py`)."""
_UNUSED_SECONDS = 30 * 24 * 3600.0
_LEFTOVER_SECONDS = 24 * 3600.0
"""Age at which a killed process's unfinished entry goes; longer than any entry takes to make."""

_WORTH_KEEPING = 1 << 20
"""Bytes below which hashing a file is quicker than looking its hash up."""

T = TypeVar("T")
Make = Callable[[Path], None]
"""Writes an entry into a folder."""
Read = Callable[[Path, object], "T | None"]
"""Reads the entry in a folder, None if it is not whole. The second argument, where it is not None,
is the owner of a temporary folder: what is mapped from its files has to keep it."""


@dataclass(frozen=True, slots=True)
class Cached(Generic[T]):
    """A cache entry; `fault` says why it could not be stored in the cache."""

    value: T
    fault: VoxError | None = None


def cache_root() -> Path:
    """Return the root of the cache, which may not exist yet."""
    if named := os.environ.get("VOX_CACHE"):
        return Path(named).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("vox", appauthor=False)


def cache_folder(name: str) -> Path:
    """Return the folder `name` of the cache, created if needed (O002 if it cannot be)."""
    folder = cache_root() / name
    try:
        files.make_folder(folder)
    except OutputError as error:
        remedy = "set VOX_CACHE to a folder that you can write to"
        raise error.but(what="the cache folder cannot be written", remedy=remedy) from error
    return folder


def cached(kind: str, key: str, make: Make, read: Read[T]) -> Cached[T]:
    """Return the entry `key` from the cache, or make it.

    If two processes make the same entry, the later one uses the other's. If the cache cannot be
    written, the entry is a temporary folder that lives as long as the returned object.

    Raises:
        StorageError: not even a temporary folder can be written.
        VoxError: an error of `make`.
    """
    folder = cache_root() / kind / key
    if folder.is_dir() and (found := read(folder, None)) is not None:
        with suppress(OSError):
            os.utime(folder)
        return Cached(found)
    try:
        return Cached(_made(cache_folder(kind) / key, make, read))
    except (OutputError, StorageError) as error:
        with files.storage_errors(Path(tempfile.gettempdir())):
            owner = tempfile.TemporaryDirectory(prefix=f"vox-{kind}-", ignore_cleanup_errors=True)
            make(Path(owner.name))
            found = read(Path(owner.name), owner)
        if found is None:
            raise
        return Cached(found, error)


def _made(folder: Path, make: Make, read: Read[T]) -> T:
    if (found := read(folder, None)) is not None:  # made by another process meanwhile
        return found
    _evict(folder)
    try:
        with files.atomic_folder(folder) as temporary:
            make(temporary)
    except (OutputError, StorageError):
        if (found := read(folder, None)) is not None:  # another process was faster
            return found
        raise
    if (found := read(folder, None)) is None:
        raise files.storage_error(OSError("what was written cannot be read"), folder)
    return found


def _evict(folder: Path) -> None:
    """Remove an unreadable entry, old ones and leftovers of killed processes; existing mappings of
    other processes stay readable."""
    shutil.rmtree(folder, ignore_errors=True)
    for other in folder.parent.iterdir():
        unfinished = other.name.startswith(files.TEMPORARY_PREFIX)
        age = _LEFTOVER_SECONDS if unfinished else _UNUSED_SECONDS
        with suppress(OSError):  # another process was faster
            if other.stat().st_mtime < time.time() - age:
                files.remove(other)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file's content, cached for large files."""
    with files.storage_errors(path):
        status = path.stat()
        if status.st_size < _WORTH_KEEPING:
            return _hash(path)
        real = path.resolve()
    key = {
        "path": str(real),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }
    kept = cache_root() / "digests" / f"{hashlib.sha256(str(real).encode()).hexdigest()}.json"
    with suppress(OSError, ValueError):  # unreadable: hashed again
        match json.loads(kept.read_bytes()):
            case {"sha256": str(sha256), **rest} if rest == key:
                return sha256
    with files.storage_errors(path):
        sha256 = _hash(path)
    with suppress(StorageError, OutputError):  # without a cache entry it is hashed again
        files.make_folder(kept.parent)
        files.write_json(kept, {**key, "sha256": sha256})
    return sha256


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
