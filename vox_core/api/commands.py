"""Command-line building blocks, so that a plugin's commands look and behave like vox's own."""

from vox_core.cli.account import account_lines
from vox_core.cli.data_flags import SECTIONS as DATA_SECTIONS
from vox_core.cli.data_flags import data_options, files_argument, with_files
from vox_core.cli.errors import STOPPED, describe, end_with
from vox_core.cli.lazy import Command, Entry, Group, LazyGroup, json_option
from vox_core.cli.options import backend_origin, given, options_of, settings_from, source_of
from vox_core.cli.output import (
    duration,
    losses,
    megabytes,
    print_columns,
    print_json,
    print_table,
    printable,
)
from vox_core.cli.train import SECTIONS as TRAIN_SECTIONS
from vox_core.config import ConvertSettings, TrainSettings

__all__ = [
    "DATA_SECTIONS",
    "STOPPED",
    "TRAIN_SECTIONS",
    "Command",
    "ConvertSettings",
    "Entry",
    "Group",
    "LazyGroup",
    "TrainSettings",
    "account_lines",
    "backend_origin",
    "data_options",
    "describe",
    "duration",
    "end_with",
    "files_argument",
    "given",
    "json_option",
    "losses",
    "megabytes",
    "options_of",
    "print_columns",
    "print_json",
    "print_table",
    "printable",
    "settings_from",
    "source_of",
    "with_files",
]
