"""Data files and flags that the commands of `vox data` share with `vox train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from vox_core.cli.options import DataFile, options_of
from vox_core.config import TrainSettings
from vox_core.config.data import DataSettings

NAMES = ("model", "revision", "template", "data", "valid", "seq_len", "config_file")
SECTIONS: dict[str, tuple[str, ...]] = {"Data": (*NAMES, *DataSettings.model_fields)}


def data_options() -> list[click.Parameter]:
    """Flags of `TrainSettings`, as far as they matter for rows."""
    wanted = {name for names in SECTIONS.values() for name in names}
    return [option for option in options_of(TrainSettings) if option.name in wanted]


def files_argument() -> click.Argument:
    """FILES, as many as there are; none for those of the settings."""
    return click.Argument(["files"], nargs=-1, type=DataFile(path_type=Path))


def with_files(files: tuple[Path, ...], flags: Mapping[str, Any]) -> dict[str, Any]:
    """`flags` with FILES before what `--data` names."""
    return {**flags, "data": (*files, *flags["data"])}
