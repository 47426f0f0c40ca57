"""Settings: the sections of `vox.toml`, and the base classes of plugins' own sections."""

from vox_core.config import TrainSettings as TrainSettings
from vox_core.config.loading import settings_faults as settings_faults
from vox_core.config.sections import seen_from as seen_from
from vox_core.config.sections import (
    Names as Names,
    PositiveInt as PositiveInt,
    Section as Section,
    Seed as Seed,
    Temperature as Temperature,
    Texts as Texts,
)
from vox_core.text import did_you_mean as did_you_mean
