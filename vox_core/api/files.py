"""Atomic files: whole or not there, with StorageError for a full or failing disk."""

from vox_core.bounded_json import read as read_json
from vox_core.cache import cache_folder, cache_root
from vox_core.files import (
    atomic_file,
    atomic_folder,
    make_folder,
    require_absent,
    require_apart,
    storage_errors,
    write_bytes,
    write_json,
    write_text,
)
from vox_core.hashes import file_sha256

__all__ = [
    "atomic_file",
    "atomic_folder",
    "cache_folder",
    "cache_root",
    "file_sha256",
    "make_folder",
    "read_json",
    "require_absent",
    "require_apart",
    "storage_errors",
    "write_bytes",
    "write_json",
    "write_text",
]
