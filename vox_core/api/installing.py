"""Install into the current environment: the catalog, uv, plans, and carrying one out."""

from vox_core.catalog import (
    Catalog as Catalog,
    PluginEntry as PluginEntry,
    Source as Source,
    objections as objections,
)
from vox_core.cli.options import config_option as config_option
from vox_core.cli.plugin_install import carry_out as carry_out, plan_options as plan_options
from vox_core.host.manifest import FILE_NAME as FILE_NAME, parse_manifest as parse_manifest
from vox_core.host.probe import device_tags as device_tags
from vox_core.install.environment import (
    CORE as CORE,
    KEPT as KEPT,
    Environment as Environment,
    closure as closure,
    is_met as is_met,
    local_path as local_path,
    origin as origin,
)
from vox_core.install.plan import (
    Change as Change,
    InstallPlan as InstallPlan,
    file_name as file_name,
    plan_wheels as plan_wheels,
)
from vox_core.install.requirements import Target as Target
from vox_core.install.uv import ONLY_WHEELS as ONLY_WHEELS, Uv as Uv, last_lines as last_lines
from vox_core.host.discover import discover as discover, known as known
