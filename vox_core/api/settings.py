"""Settings: the sections of `vox.toml`, and the base classes of plugins' own sections."""

from vox_core.config.loading import settings_faults as settings_faults
from vox_core.config.sections import (
    Count as Count,
    DataSettings as DataSettings,
    DTypeChoice as DTypeChoice,
    LoadSettings as LoadSettings,
    ModelUse as ModelUse,
    Names as Names,
    Paths as Paths,
    PositiveInt as PositiveInt,
    Seconds as Seconds,
    Section as Section,
    Seed as Seed,
    Temperature as Temperature,
    Texts as Texts,
    TrainSettings as TrainSettings,
    seen_from as seen_from,
)
from vox_core.text import did_you_mean as did_you_mean
