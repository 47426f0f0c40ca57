"""Load the catalog with the user's additional files (`VOX_CATALOG`, `vox.toml`).

    known().plugins["cpu"]      known().models["smollm2-135m"]

All commands look up plugins, models and bundles here, so that additional catalogs apply to every
command. With `--config FILE` that file is the `vox.toml` (config.reading).
"""

from __future__ import annotations

from collections.abc import Mapping

from vox_core.catalog import Catalog, PluginEntry, load_catalog
from vox_core.config import PluginSettings, load_settings


def known() -> Catalog:
    """Return the catalog with the user's additional files.

    Raises:
        ConfigError: a catalog, `vox.toml` or a variable about plugins is wrong.
    """
    return load_catalog(load_settings(PluginSettings, {}).catalogs)


def known_plugins() -> Mapping[str, PluginEntry]:
    """Return id -> plugin of the catalog; errors as for `known`."""
    return known().plugins
