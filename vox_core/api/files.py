"""Atomic files, whole or not there, with StorageError for a full or failing disk; vox's cache."""

from vox_core.cache import cache_folder, cache_root
from vox_core.files import atomic_file, storage_errors, write_json

__all__ = ["atomic_file", "cache_folder", "cache_root", "storage_errors", "write_json"]
