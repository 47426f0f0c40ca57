"""Atomic files: whole or not there, with StorageError for a full or failing disk."""

from vox_core.files import atomic_file, make_folder, require_apart, storage_errors

__all__ = ["atomic_file", "make_folder", "require_apart", "storage_errors"]
