"""Atomic files: whole or not there, with StorageError for a full or failing disk."""

from vox_core import bounded_json
from vox_core.cache import cache_folder as cache_folder, cache_root as cache_root
from vox_core.cache import file_sha256 as file_sha256
from vox_core.files import (
    atomic_file as atomic_file,
    append as append,
    atomic_folder as atomic_folder,
    default_out as default_out,
    free_space as free_space,
    make_folder as make_folder,
    require_absent as require_absent,
    require_apart as require_apart,
    require_space as require_space,
    storage_errors as storage_errors,
    write_bytes as write_bytes,
    write_json as write_json,
    write_text as write_text,
)

read_json = bounded_json.read
parse_json = bounded_json.parse
is_deep = bounded_json.is_deep
JsonFault = bounded_json.JsonFault
