"""Arrays that were computed from data files, in the cache under a name that says from what.

An entry is a `.npz` with a JSON text beside the arrays; zip's own checksums tell one that is torn.
What cannot be read is not there, and what cannot be written is computed again next time. An entry
that nobody has used for a month goes when another of its kind is made.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import files
from vox_core.cache import cache_folder, cache_root
from vox_core.errors import OutputError, StorageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ABOUT = "about"
_UNUSED_FOR = 30 * 24 * 3600.0


def read(kind: str, name: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """The arrays and the JSON of an entry; None if there is none that is whole."""
    import numpy as np

    path = _path(cache_root() / kind, name)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            arrays = {each: found[each] for each in found.files}
        about = json.loads(arrays.pop(_ABOUT).tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    with suppress(OSError):
        os.utime(path)
    return (arrays, about) if isinstance(about, dict) else None


def write(kind: str, name: str, arrays: Mapping[str, NDArray[Any]], about: object) -> None:
    """Put an entry there, if that can be done."""
    import numpy as np

    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with suppress(StorageError, OutputError):
        folder = cache_folder(kind)
        _clear(folder)
        with files.atomic_file(_path(folder, name)) as file:
            np.savez(file, allow_pickle=False, **{**arrays, _ABOUT: text})


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.npz"


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):  # another process was quicker
            if path.stat().st_mtime < time.time() - _UNUSED_FOR:
                files.remove(path)
