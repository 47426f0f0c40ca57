"""Install into the current environment: the catalog, uv, plans, and carrying one out."""

from vox_core.catalog import Catalog, PluginEntry, Source, objections
from vox_core.cli.options import config_option
from vox_core.cli.plugin_install import carry_out, plan_options
from vox_core.host.manifest import FILE_NAME, parse_manifest
from vox_core.host.probe import device_tags
from vox_core.install.environment import CORE, KEPT, Environment, closure, is_met, local_path
from vox_core.install.plan import Change, InstallPlan, file_name, plan_wheels
from vox_core.install.targets import Target
from vox_core.install.uv import ONLY_WHEELS, Uv, last_lines
from vox_core.known import known

__all__ = [
    "CORE",
    "FILE_NAME",
    "KEPT",
    "ONLY_WHEELS",
    "Catalog",
    "Change",
    "Environment",
    "InstallPlan",
    "PluginEntry",
    "Source",
    "Target",
    "Uv",
    "carry_out",
    "closure",
    "config_option",
    "device_tags",
    "file_name",
    "is_met",
    "known",
    "last_lines",
    "local_path",
    "objections",
    "parse_manifest",
    "plan_options",
    "plan_wheels",
]
