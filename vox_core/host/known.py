"""Read the plugins of the catalog, as the user's settings extend it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vox_core.catalog import PluginEntry


def known_plugins(environ: Mapping[str, str] = os.environ) -> Mapping[str, PluginEntry]:
    """Return id -> catalog entry.

    Raises:
        ConfigError: a catalog or `vox.toml` is wrong.
    """
    from vox_core.known import known

    return known(environ).plugins
