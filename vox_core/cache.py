"""Where vox keeps what it can make again: converted models, digests.

`VOX_CACHE` names the root; without it the root follows the platform (`~/.cache/vox` on Linux).
"""

from __future__ import annotations

import os
from pathlib import Path

from vox_core import files
from vox_core.errors import OutputError

CACHE_VERSION = 2
"""Version of everything derived from data files: rows, facts, templates, tokens. Raise it with each
change of the code that changes them: entries of another version are not used. A test compares it
with the golden tokens (`tests/golden/test_cache_version.py`)."""


def cache_root() -> Path:
    """The root of the cache; it need not exist yet."""
    if named := os.environ.get("VOX_CACHE"):
        return Path(named).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("vox", appauthor=False)


def cache_folder(name: str) -> Path:
    """The folder `name` of the cache, made if need be.

    Raises:
        OutputError: it cannot be made.
    """
    folder = cache_root() / name
    try:
        files.make_folder(folder)
    except OutputError as error:
        raise OutputError(
            "O002",
            "the cache folder cannot be written",
            where=folder,
            found=error.found,
            remedy="set VOX_CACHE to a folder that you can write to",
        ) from error
    return folder
