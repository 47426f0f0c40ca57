"""Command-line building blocks, so that a plugin's commands look and behave like vox's own."""

from vox_core.cli.errors import STOPPED
from vox_core.cli.lazy import Command, Entry, Group, LazyGroup, json_option
from vox_core.cli.options import options_of, settings_from
from vox_core.cli.output import (
    duration,
    losses,
    megabytes,
    print_columns,
    print_json,
    print_table,
    printable,
)
from vox_core.config import ConvertSettings

__all__ = [
    "STOPPED",
    "Command",
    "ConvertSettings",
    "Entry",
    "Group",
    "LazyGroup",
    "duration",
    "json_option",
    "losses",
    "megabytes",
    "options_of",
    "print_columns",
    "print_json",
    "print_table",
    "printable",
    "settings_from",
]
