"""The flags of `vox data`: those of `vox train` that say which rows there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.cli.options import options_of
from vox_core.config import DataSettings, TrainSettings

if TYPE_CHECKING:
    import click

OF_TRAIN = ("model", "revision", "data", "valid", "seq_len")


def data_options() -> list[click.Parameter]:
    """Model, data, sequence length, the keys of `[data]`, and `--config`."""
    wanted = {*OF_TRAIN, *DataSettings.own_fields(), "config_file"}
    return [option for option in options_of(TrainSettings) if option.name in wanted]
