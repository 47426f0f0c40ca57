"""The catalog as this user has it: vox's own, and those that `vox.toml` and `VOX_CATALOG` name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vox_core.catalog import PluginEntry


def known_plugins(environ: Mapping[str, str] = os.environ) -> Mapping[str, PluginEntry]:
    """Id -> entry.

    Raises:
        ConfigError: a catalog or `vox.toml` is wrong.
    """
    from vox_core.catalog import load_catalog
    from vox_core.config import PluginSettings, load_settings

    settings = load_settings(PluginSettings, {}, environ=environ)
    return load_catalog(settings.catalogs, environ=environ).plugins
