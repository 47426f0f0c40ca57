"""Flags that the commands of `vox data` share with `vox train`: those that say what is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.cli.options import options_of
from vox_core.config import TrainSettings
from vox_core.config.data import DataSettings

if TYPE_CHECKING:
    import click

NAMES = ("model", "revision", "data", "valid", "seq_len", "config_file")
SECTIONS: dict[str, tuple[str, ...]] = {"Data": (*NAMES, *DataSettings.model_fields)}


def data_options() -> list[click.Parameter]:
    """Flags of `TrainSettings`, as far as they matter for rows."""
    wanted = {name for names in SECTIONS.values() for name in names}
    return [option for option in options_of(TrainSettings) if option.name in wanted]
