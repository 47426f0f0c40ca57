"""Atomic files and folders: whole or not there, with StorageError for a full or failing disk."""

from vox_core.files import (
    atomic_file,
    atomic_folder,
    make_folder,
    require_absent,
    require_apart,
    storage_errors,
)

__all__ = [
    "atomic_file",
    "atomic_folder",
    "make_folder",
    "require_absent",
    "require_apart",
    "storage_errors",
]
