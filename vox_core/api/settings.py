"""Settings: the sections of `vox.toml`, and what sections of plugins are made of."""

from vox_core.config import TrainSettings
from vox_core.config.faults import settings_faults
from vox_core.config.source import sources_seen_from
from vox_core.config.values import Names, PositiveInt, Section, Seed

__all__ = [
    "Names",
    "PositiveInt",
    "Section",
    "Seed",
    "TrainSettings",
    "settings_faults",
    "sources_seen_from",
]
