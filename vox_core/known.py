"""The catalog as this user has it: vox's own, and those that `VOX_CATALOG` and `vox.toml` name.

    known().plugins["cpu"]      known().models["smollm2-135m"]

Whoever looks up a plugin, a model or a bundle asks here, so that one of a further catalog is known
to every command or to none. With `--config FILE` that file is the `vox.toml` (config.reading).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from vox_core.catalog import Catalog, load_catalog


def known(environ: Mapping[str, str] = os.environ) -> Catalog:
    """Every entry.

    Raises:
        ConfigError: a catalog, `vox.toml` or a variable about plugins is wrong.
    """
    from vox_core.config import PluginSettings, load_settings

    settings = load_settings(PluginSettings, {}, environ=environ)
    return load_catalog(settings.catalogs, environ=environ)
