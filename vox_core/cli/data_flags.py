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
    """Return the flags of `TrainSettings` that concern data."""
    wanted = {name for names in SECTIONS.values() for name in names}
    return [option for option in options_of(TrainSettings) if option.name in wanted]


def files_argument() -> click.Argument:
    """Return the argument FILES: any number; without one, the settings name the files."""
    return click.Argument(["files"], nargs=-1, type=DataFile(path_type=Path))


def with_files(files: tuple[Path, ...], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return `flags` with FILES put before the files of `--data`."""
    return {**flags, "data": (*files, *flags["data"])}
