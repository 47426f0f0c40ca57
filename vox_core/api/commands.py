"""Command-line building blocks, so that a plugin's commands look and behave like vox's own."""

from vox_core.cli.failures import (
    STOPPED as STOPPED,
    describe as describe,
    kept_if_stopped as kept_if_stopped,
)
from vox_core.cli.lazy import Command as Command, Group as Group, json_option as json_option
from vox_core.cli.options import (
    files_argument as files_argument,
    options_of as options_of,
    settings_from as settings_from,
    with_files as with_files,
)
from vox_core.cli.output import (
    counted as counted,
    duration as duration,
    losses as losses,
    megabytes as megabytes,
    named as named,
    print_columns as print_columns,
    print_json as print_json,
    print_table as print_table,
    printable as printable,
)
from vox_core.cli.train import TRAIN_SECTIONS as TRAIN_SECTIONS
from vox_core.config import given as given
