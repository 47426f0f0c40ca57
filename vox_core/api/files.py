"""Atomic files and folders: whole or not there, StorageError on a failing disk; bounded JSON."""

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
)

__all__ = [
    "atomic_file",
    "atomic_folder",
    "cache_folder",
    "cache_root",
    "make_folder",
    "read_json",
    "require_absent",
    "require_apart",
    "storage_errors",
    "write_bytes",
    "write_json",
]
