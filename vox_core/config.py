"""Settings: `vox.toml`, then the environment, then flags; the later wins.

One pydantic model per section is the only list of settings there is: the command line makes its
flags from it, `vox config schema` its JSON schema, `docs/reference/config.md` its table. A key is
spelt alike in all of them (`micro-batch-tokens`, `--micro-batch-tokens`,
`VOX_TRAIN_MICRO_BATCH_TOKENS`). Unknown keys are errors that name the nearest known one.

This module reads files and variables; it decides nothing about models, data or backends.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

CONFIG_FILE = "vox.toml"
DEFAULT_MODEL = "smollm2-135m"

PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0)]
DTypeChoice = Literal["auto", "bf16", "fp16", "fp32"]


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Section(BaseModel):
    """Base of all sections: frozen, kebab-case keys, nothing unknown."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=_kebab, populate_by_name=True
    )
    section: ClassVar[str]


class TrainSettings(Section):
    """`vox train`."""

    section: ClassVar[str] = "train"

    model: str = Field(
        DEFAULT_MODEL, description="Base model: folder, hub id, GGUF file or catalog id."
    )
    revision: str | None = Field(None, description="Commit or tag of a hub model.")
    data: tuple[Path, ...] = Field(
        (), description="JSONL file, or folder with train.jsonl (and valid.jsonl). Repeatable."
    )
    valid: Path | None = Field(None, description="JSONL file with held-out rows.")
    out: Path | None = Field(None, description="Run folder to make.  [default: runs/MODEL-TIME]")
    backend: str | None = Field(None, description="Backend to use, and no other.")
    dtype: DTypeChoice = Field("auto", description="Compute dtype of the base and the adapter.")
    method: Literal["lora", "rslora", "dora"] = Field("lora", description="Kind of adapter.")
    rank: PositiveInt = Field(16, description="Rank of the adapter.")
    alpha: Annotated[float, Field(gt=0)] = Field(32.0, description="Scale is alpha / rank.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Adapter dropout.")
    targets: tuple[str, ...] = Field(
        ("all-linear",), description="Modules to train: all-linear, or names. Repeatable."
    )
    modules_to_save: tuple[str, ...] = Field(
        (), description="Modules trained whole, such as lm_head. Repeatable."
    )
    epochs: Annotated[float, Field(gt=0)] = Field(1.0, description="Passes over the data.")
    max_steps: Count = Field(0, description="Optimizer steps; 0 leaves it to --epochs.")
    batch_size: PositiveInt = Field(8, description="Conversations per optimizer step.")
    micro_batch_tokens: PositiveInt = Field(
        2048, description="Tokens computed at once; bounds memory, never changes the loss."
    )
    seq_len: Annotated[int, Field(gt=1)] = Field(2048, description="Longest document, in tokens.")
    lr: Annotated[float, Field(gt=0)] = Field(2e-4, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Learning rate after warm-up."
    )
    warmup: Share = Field(0.03, description="Share of the steps with a rising rate.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's decay.")
    clip: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Bound on the global gradient norm; 0 turns it off."
    )
    seed: Count = Field(42, description="Seed of adapter, order and dropout.")
    eval_every: Count = Field(0, description="Steps between validations; 0: only at the end.")
    save_every: Count = Field(100, description="Steps between checkpoints; 0: only at the end.")
    resume: Path | None = Field(None, description="Run folder to go on with.")
    allow_cpu: bool = Field(
        False, description="Train on the CPU although better hardware is present."
    )


class ModelUse(Section):
    """What generating, chatting and merging have in common."""

    backend: str | None = Field(None, description="Backend to use, and no other.")


class SamplingSettings(ModelUse):
    """How answers are made."""

    adapter: str | None = Field(
        None, description="Another adapter folder, or `none` to hear the base model."
    )
    dtype: DTypeChoice = Field("auto", description="Compute dtype.")
    max_tokens: PositiveInt = Field(512, description="Longest answer, in tokens.")
    temperature: Temperature = Field(0.0, description="0 is greedy; higher is more varied.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling.")
    seed: Count = Field(0, description="Seed of sampling.")
    system: str | None = Field(None, description="System message.")


class GenerateSettings(SamplingSettings):
    """`vox generate`."""

    section: ClassVar[str] = "generate"


class ChatSettings(SamplingSettings):
    """`vox chat`."""

    section: ClassVar[str] = "chat"

    temperature: Temperature = Field(0.7, description="0 is greedy; higher is more varied.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(0.95, description="Nucleus sampling.")


class MergeSettings(ModelUse):
    """`vox merge`."""

    section: ClassVar[str] = "merge"

    model: str | None = Field(None, description="Base model, if not the one the run names.")
    out: Path | None = Field(None, description="Folder to make.  [default: RUN-merged]")


class VoxToml(Section):
    """All of `vox.toml`."""

    train: TrainSettings = TrainSettings()
    generate: GenerateSettings = GenerateSettings()
    chat: ChatSettings = ChatSettings()
    merge: MergeSettings = MergeSettings()


SECTIONS: tuple[type[Section], ...] = (
    TrainSettings,
    GenerateSettings,
    ChatSettings,
    MergeSettings,
)
S = TypeVar("S", bound=Section)


def load_settings(
    kind: type[S],
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> S:
    """Settings of one section from all three sources.

    Args:
        kind: the section's model.
        flags: what was given on the command line, by field name; nothing that was not given.
        file: the `vox.toml` to read; without it the one in the current folder, if there is one.

    Raises:
        ConfigError: C001 unknown keys, C002 bad values (all of them), C003 unreadable file.
    """
    table = read_toml(file)
    section = table.get(kind.section, {})
    values = {**_fields(kind, section), **_from_environment(kind, environ), **flags}
    return validate(kind, values)


def read_toml(file: Path | None) -> dict[str, dict[str, Any]]:
    """The tables of `vox.toml`, with section names and keys checked.

    Raises:
        ConfigError: C001, C003.
    """
    path = file or Path(CONFIG_FILE)
    if file is None and not path.exists():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "C003",
            f"{CONFIG_FILE} cannot be read",
            where=path,
            found=error,
            remedy="mend the file, or name another one with --config",
        ) from error
    _require_known(table, path)
    return table


def validate(kind: type[S], values: Mapping[str, Any]) -> S:
    """Build a section.

    Raises:
        ConfigError: C001 or C002, naming every fault.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        faults = [_fault(detail) for detail in error.errors()]
    raise ConfigError(
        "C002",
        "a setting has a value of the wrong type or outside its range",
        where=f"[{kind.section}]",
        faults=faults,
        remedy=f"correct it; `vox {kind.section} --help` shows what each setting takes",
    )


def _require_known(table: Mapping[str, Any], path: Path) -> None:
    kinds = {kind.section: kind for kind in SECTIONS}
    faults = []
    for section, keys in table.items():
        if section not in kinds or not isinstance(keys, dict):
            faults.append(_unknown(f"[{section}]", section, kinds))
            continue
        known = {_kebab(name) for name in kinds[section].model_fields}
        faults += [_unknown(f"[{section}] {key}", key, known) for key in keys if key not in known]
    if faults:
        raise ConfigError(
            "C001",
            f"unknown keys in {CONFIG_FILE}",
            where=path,
            faults=faults,
            remedy="correct or remove them; `vox config schema` prints every key",
        )


def _unknown(shown: str, key: str, known: Any) -> str:
    near = difflib.get_close_matches(_kebab(key), list(known), n=1)
    return f"{shown} is unknown" + (f"; did you mean {near[0]}?" if near else "")


def _fields(kind: type[Section], keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in keys.items()}


def _from_environment(kind: type[Section], environ: Mapping[str, str]) -> dict[str, Any]:
    """`VOX_TRAIN_LR=1e-4`; lists are separated by commas. `VOX_BACKEND` serves every section."""
    prefix = f"VOX_{kind.section.upper()}_"
    values: dict[str, Any] = {}
    if "backend" in kind.model_fields and environ.get("VOX_BACKEND"):
        values["backend"] = environ["VOX_BACKEND"]
    for name, text in environ.items():
        if not name.startswith(prefix):
            continue
        field = name.removeprefix(prefix).lower()
        if field not in kind.model_fields:
            raise ConfigError(
                "C001",
                "unknown setting in the environment",
                where=name,
                faults=[_unknown(name, field, map(_kebab, kind.model_fields))],
                remedy="correct or unset it; `vox config schema` prints every key",
            )
        many = kind.model_fields[field].annotation in (tuple[str, ...], tuple[Path, ...])
        values[field] = tuple(text.split(",")) if many else text
    return values


def _fault(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    return f"{_kebab(key)} = {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
