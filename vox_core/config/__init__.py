"""Settings, merged from `vox.toml`, the environment and flags; the later wins.

One pydantic model per section is the only list of its settings: the command line makes its flags
from it, `vox config schema` its JSON schema, `docs/reference/config.md` its table. A key is
spelt alike in all of them (`micro-batch-tokens`, `--micro-batch-tokens`,
`VOX_TRAIN_MICRO_BATCH_TOKENS`). Unknown keys are errors that name the nearest known one.

sections.py lists the settings with the types of their values; loading.py merges the sources.
"""

from vox_core.config.loading import (
    CONFIG_FILE as CONFIG_FILE,
    given as given,
    in_python as in_python,
    load_settings as load_settings,
    named_file as named_file,
    reading as reading,
    require_keywords as require_keywords,
    settings_file as settings_file,
    validate as validate,
)
from vox_core.config.sections import (
    FULL_LR as FULL_LR,
    LORA_LR as LORA_LR,
    SECTIONS as SECTIONS,
    ChatSettings as ChatSettings,
    DataSettings as DataSettings,
    GenerateSettings as GenerateSettings,
    LoadSettings as LoadSettings,
    MergeSettings as MergeSettings,
    ModelUse as ModelUse,
    PluginSettings as PluginSettings,
    SamplingSettings as SamplingSettings,
    TrainSettings as TrainSettings,
    toml_schema as toml_schema,
    Change as Change,
    DataSource as DataSource,
    Section as Section,
    is_table as is_table,
)
