"""Settings: the sections of `vox.toml`, and what sections of plugins are made of."""

from vox_core.config import TrainSettings as TrainSettings
from vox_core.config.faults import settings_faults as settings_faults
from vox_core.config.source import sources_seen_from as sources_seen_from
from vox_core.config.values import (
    Names as Names,
    PositiveInt as PositiveInt,
    Section as Section,
    Seed as Seed,
)
