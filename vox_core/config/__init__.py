"""Settings, merged from `vox.toml`, the environment and flags; the later wins.

One pydantic model per section is the only list of its settings: the command line makes its flags
from it, `vox config schema` its JSON schema, `docs/reference/config.md` its table. A key is
spelt alike in all of them (`micro-batch-tokens`, `--micro-batch-tokens`,
`VOX_TRAIN_MICRO_BATCH_TOKENS`). Unknown keys are errors that name the nearest known one.

values.py defines the types of values; data.py, train.py and sections.py list the settings; read.py
merges the sources.
"""

from vox_core.config.data import DataSettings
from vox_core.config.read import (
    CONFIG_FILE,
    given,
    load_settings,
    read_toml,
    reading,
    settings_file,
    source_of,
    unknown_settings,
    validate,
)
from vox_core.config.sections import (
    SECTIONS,
    ChatSettings,
    ConvertSettings,
    GenerateSettings,
    MergeSettings,
    ModelUse,
    PluginSettings,
    SamplingSettings,
    VoxToml,
    toml_schema,
)
from vox_core.config.source import DataSource
from vox_core.config.train import DEFAULT_MODEL, TrainSettings
from vox_core.config.values import Change, Section, homes, is_table

__all__ = [
    "CONFIG_FILE",
    "DEFAULT_MODEL",
    "SECTIONS",
    "Change",
    "ChatSettings",
    "ConvertSettings",
    "DataSettings",
    "DataSource",
    "GenerateSettings",
    "MergeSettings",
    "ModelUse",
    "PluginSettings",
    "SamplingSettings",
    "Section",
    "TrainSettings",
    "VoxToml",
    "given",
    "homes",
    "is_table",
    "load_settings",
    "read_toml",
    "reading",
    "settings_file",
    "source_of",
    "toml_schema",
    "unknown_settings",
    "validate",
]
