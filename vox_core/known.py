"""Load the catalog with the user's additional files (`VOX_CATALOG`, `vox.toml`).

    known().plugins["cpu"]      known().models["smollm2-135m"]

All commands look up plugins, models and bundles here, so that additional catalogs apply to every
command. With `--config FILE` that file is the `vox.toml` (config.reading).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from vox_core.catalog import Catalog, load_catalog


def known(environ: Mapping[str, str] = os.environ) -> Catalog:
    """Return the catalog with the user's additional files.

    Raises:
        ConfigError: a catalog, `vox.toml` or a variable about plugins is wrong.
    """
    from vox_core.config import PluginSettings, load_settings

    settings = load_settings(PluginSettings, {}, environ=environ)
    return load_catalog(settings.catalogs, environ=environ)
