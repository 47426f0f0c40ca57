"""An installer, pip or uv, that sees one folder of wheels and nothing else.

No index, no network, and none of the user's settings that would add one. Every wheel has to have
the hash that it is asked for by.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_KEPT = ("UV_CACHE_DIR", "UV_LINK_MODE")
"""Where and how uv keeps its files says nothing about where packages come from."""


def options(folder: Path) -> list[str]:
    """What pip and uv alike are told."""
    return ["--no-index", "--require-hashes", "--find-links", str(folder)]


def environ(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables in which the installer runs."""
    kept = {
        name: value
        for name, value in given.items()
        if not name.startswith(("PIP_", "UV_")) or name in _KEPT
    }
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
