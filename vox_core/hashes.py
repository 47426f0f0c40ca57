"""SHA-256 of files, with the hashes of large ones cached.

The hash of a large file is cached under its real path, size and times. A file changed in place has
other times and is hashed again.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from vox_core import files
from vox_core.cache import cache_root
from vox_core.errors import OutputError, StorageError

_WORTH_KEEPING = 1 << 20
"""Bytes below which hashing a file is quicker than looking its hash up."""


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
