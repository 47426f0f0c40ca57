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
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vox_core import bounded_toml
from vox_core.contract import Quant
from vox_core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

CONFIG_FILE = "vox.toml"
DEFAULT_MODEL = "smollm2-135m"

_stand_in: ContextVar[Path | None] = ContextVar("stand_in", default=None)


def _one_or_many(value: Any) -> Any:
    """A list that has one element may be written without brackets."""
    return (value,) if isinstance(value, str | Path) else value


def _seconds(value: Any) -> Any:
    """`90m`, `2h`, `45s` or `1h30m` as seconds; a number is pydantic's to judge.

    Raises:
        ValueError: it is neither.
    """
    text = value.strip().lower() if isinstance(value, str) else ""
    if not text or text.replace(".", "", 1).isdigit():
        return value
    if not (found := _DURATION.fullmatch(text)):
        raise ValueError("give a time such as 90m, 2h, 1h30m, or seconds")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + seconds


_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
Paths = Annotated[tuple[Path, ...], BeforeValidator(_one_or_many)]
Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0)]
Change = Literal[
    "clip", "dropout", "dtype", "epochs", "lr", "max-steps", "schedule", "valid", "warmup",
    "weight-decay",
]  # fmt: skip
"""What a resumed run may change: never model, rows, their order or the shape of the adapter."""
Changes = Annotated[tuple[Change, ...], BeforeValidator(_one_or_many)]
DTypeChoice = Literal["auto", "bf16", "fp16", "fp32"]


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Section(BaseModel):
    """Base of all sections: frozen, kebab-case keys, nothing unknown."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=_kebab,
        populate_by_name=True,
        allow_inf_nan=False,
    )
    section: ClassVar[str]


class TrainSettings(Section):
    """`vox train`."""

    section: ClassVar[str] = "train"

    model: str = Field(DEFAULT_MODEL, description="Base: folder, hub id, GGUF file or catalog id.")
    revision: str | None = Field(None, description="Commit or tag of a hub model.")
    data: Paths = Field(
        (), description="JSONL file, or folder with train.jsonl (and valid.jsonl). Repeatable."
    )
    valid: Path | None = Field(None, description="JSONL file with held-out rows.")
    out: Path | None = Field(None, description="Run folder to make.  [default: runs/MODEL-TIME]")
    backend: str | None = Field(None, description="Backend to use, and no other.")
    dtype: DTypeChoice = Field("auto", description="Compute dtype of the base and the adapter.")
    quant: Quant = Field(
        "none", description="Quantisation of the base's linear layers; none: as its files are."
    )
    method: Literal["lora", "rslora", "dora"] = Field("lora", description="Kind of adapter.")
    rank: PositiveInt = Field(16, description="Rank of the adapter.")
    alpha: Annotated[float, Field(gt=0)] = Field(32.0, description="Scale is alpha / rank.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Adapter dropout.")
    targets: Names = Field(
        ("all-linear",), description="Modules to train: all-linear, or names. Repeatable."
    )
    modules_to_save: Names = Field(
        (), description="Modules trained whole, such as lm_head. Repeatable."
    )
    epochs: Annotated[float, Field(gt=0, le=1e6)] = Field(1.0, description="Passes over the data.")
    max_steps: Count = Field(0, description="Optimizer steps; 0 leaves it to --epochs.")
    batch_size: PositiveInt = Field(8, description="Conversations per optimizer step.")
    micro_batch_tokens: PositiveInt = Field(
        2048, description="Tokens computed at once; bounds memory, not a matter of the loss."
    )
    tune: Literal["use", "refresh", "ignore"] = Field(
        "use",
        description="What was measured to be fastest here: use it if it is known, measure it "
        "first, or ignore it.",
    )
    tune_budget: Literal["minimal", "balanced", "full"] = Field(
        "balanced", description="How much to measure: about one, five or twenty minutes at most."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations for the gradients: less memory, more time."
    )
    seq_len: Annotated[int, Field(gt=1)] = Field(2048, description="Longest document, in tokens.")
    optimizer: Literal["adamw", "adamw-8bit"] = Field(
        "adamw", description="AdamW; adamw-8bit keeps the moments of large tensors in 8 bits."
    )
    lr: Annotated[float, Field(gt=0)] = Field(2e-4, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Learning rate after warm-up."
    )
    warmup: Share = Field(0.03, description="Share of the steps with a rising rate.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's decay.")
    clip: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Bound on the global gradient norm; 0 turns it off."
    )
    seed: Seed = Field(42, description="Seed of adapter, order and dropout.")
    eval_every: Count = Field(0, description="Steps between validations; 0: only at the end.")
    save_every: Count = Field(100, description="Steps between checkpoints; 0: only at the end.")
    save_minutes: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Minutes between checkpoints, whatever the steps; 0 turns it off."
    )
    save_epochs: bool = Field(False, description="A checkpoint at the end of each epoch, too.")
    keep: PositiveInt = Field(2, description="Checkpoints to keep: so many of the newest.")
    keep_every: Count = Field(
        0, description="Keep for good the checkpoints of every so many steps; 0: of none."
    )
    max_time: Seconds = Field(
        0.0, description="Stop, resumable, after so long: 90m, 2h or seconds; 0: no limit."
    )
    patience: Count = Field(
        0, description="Stop after so many validations without a better one; 0: never."
    )
    load_best_at_end: bool = Field(
        False, description="Write the adapter of the best validation, not of the last step."
    )
    max_bad_steps: PositiveInt = Field(
        3, description="Steps in a row with a loss or gradient that is not finite, until it ends."
    )
    resume: Path | Literal["auto"] | None = Field(
        None, description="Run folder to go on with; auto: that of --out, which is begun if new."
    )
    allow_change: Changes = Field(
        (), description="What may differ from the run that is resumed. Repeatable."
    )
    allow_cpu: bool = Field(False, description="Train on the CPU though better hardware is there.")


class ModelUse(Section):
    """What generating, chatting and merging have in common."""

    backend: str | None = Field(None, description="Backend to use, and no other.")


class SamplingSettings(ModelUse):
    """How answers are made."""

    adapter: str | None = Field(
        None, description="Another adapter folder, or `none` to hear the base model."
    )
    dtype: DTypeChoice = Field("auto", description="Compute dtype.")
    quant: Quant | None = Field(
        None, description="Quantisation of the base, by default the one the run was trained with."
    )
    max_tokens: PositiveInt = Field(512, description="Longest answer, in tokens.")
    temperature: Temperature = Field(0.0, description="0 is greedy; higher is more varied.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling.")
    seed: Seed = Field(0, description="Seed of sampling.")
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
    dtype: DTypeChoice = Field(
        "auto", description="Dtype to store, the base's by default; fp32 rounds nothing away."
    )
    onto: Literal["base", "trained-base"] = Field(
        "base",
        description="What the adapter is added to: the base's own weights, or those that a "
        "quantised run was trained on.",
    )
    quant: Literal["none", "affine4", "affine8", "mxfp4", "nvfp4"] = Field(
        "none", description="Write the linear layers quantised, in MLX's format."
    )


class ConvertSettings(Section):
    """`vox convert`."""

    section: ClassVar[str] = "convert"

    to: Literal["peft", "mlx"] | None = Field(None, description="Format to write.")
    model: str | None = Field(None, description="Base model, if not the one the adapter names.")
    out: Path | None = Field(None, description="Folder to make.  [default: RUN-FORMAT]")


class PluginSettings(Section):
    """Which plugins vox knows of, and which it leaves alone."""

    section: ClassVar[str] = "plugin"

    catalogs: Paths = Field((), description="Further catalog files, beside vox's own. Repeatable.")
    blocked: Names = Field((), description="Ids of plugins not to use. Repeatable.")


class VoxToml(Section):
    """All of `vox.toml`."""

    train: TrainSettings = TrainSettings()
    generate: GenerateSettings = GenerateSettings()
    chat: ChatSettings = ChatSettings()
    merge: MergeSettings = MergeSettings()
    convert: ConvertSettings = ConvertSettings()
    plugin: PluginSettings = PluginSettings()


SECTIONS: tuple[type[Section], ...] = (
    TrainSettings,
    GenerateSettings,
    ChatSettings,
    MergeSettings,
    ConvertSettings,
    PluginSettings,
)
S = TypeVar("S", bound=Section)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Within it `file` stands in for the `vox.toml` of the current folder, in every section.

    A command enters it for its `--config`, so that the catalogs and the blocked plugins, which are
    looked up deep below, come from the same file as the settings that it was given.
    """
    before = _stand_in.set(file)
    try:
        yield
    finally:
        _stand_in.reset(before)


def settings_file() -> Path:
    """The settings file of this command, which need not exist."""
    return _stand_in.get() or Path(CONFIG_FILE)


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
        file: the `vox.toml` to read; without it the one of the command (`reading`), or else the
            one in the current folder, if there is one.

    Raises:
        ConfigError: C001 unknown keys, C002 bad values (all of them), C003 unreadable file.
    """
    section = read_toml(file).get(kind.section, {})
    written = _fields(kind, section, (file or settings_file()).parent)
    variables = _from_environment(kind, environ)
    values = {name: variable.value for name, variable in variables.items()}
    origins = {
        **dict.fromkeys(written, str(file or settings_file())),
        **{name: variable.name for name, variable in variables.items()},
        **dict.fromkeys(flags, "the command line"),
    }
    return validate(kind, {**written, **values, **flags}, origins)


def read_toml(file: Path | None) -> dict[str, dict[str, Any]]:
    """The tables of `vox.toml`, with section names and keys checked.

    Raises:
        ConfigError: C001, C003.
    """
    path = file or settings_file()
    if file is None and _stand_in.get() is None and not path.exists():
        return {}
    try:
        table = bounded_toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "C003",
            f"{CONFIG_FILE} cannot be read",
            where=path,
            found=error.strerror if isinstance(error, OSError) else error,
            remedy="correct the file or its name, or name another one with --config",
        ) from error
    _require_known(table, path)
    return table


def validate(
    kind: type[S], values: Mapping[str, Any], origins: Mapping[str, str] | None = None
) -> S:
    """Build a section.

    Args:
        origins: field -> where its value was said, for the words of an error.

    Raises:
        ConfigError: C001 or C002, naming every fault.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        faults = [_fault(detail, origins or {}) for detail in error.errors()]
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
        if not isinstance(keys, dict):
            faults.append(f"{section} stands outside all sections{_home(section)}")
            continue
        if section not in kinds:
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


def _home(key: str) -> str:
    """Where a key that stands outside all sections belongs."""
    name = key.replace("-", "_")
    home = next((kind.section for kind in SECTIONS if name in kind.model_fields), None)
    return f"; put it under [{home}]" if home else ""


def _unknown(shown: str, key: str, known: Any) -> str:
    spelt = _kebab(key) if key.islower() else key  # variables are spelt in capitals
    near = difflib.get_close_matches(spelt, list(known), n=1)
    return f"{shown} is unknown" + (f"; did you mean {near[0]}?" if near else "")


def _fields(kind: type[Section], keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Keys as field names, and paths as seen from the folder of the file that holds them."""
    fields = {key.replace("-", "_"): value for key, value in keys.items()}
    for name, value in fields.items():
        annotation = str(kind.model_fields[name].annotation)
        if "Path" not in annotation or f"'{value}'" in annotation:  # a word, such as `auto`
            continue
        if isinstance(value, str):
            fields[name] = folder / value
        elif isinstance(value, list):
            fields[name] = [folder / one if isinstance(one, str) else one for one in value]
    return fields


class _Variable(NamedTuple):
    name: str
    value: Any


def _from_environment(kind: type[Section], environ: Mapping[str, str]) -> dict[str, _Variable]:
    """`VOX_TRAIN_LR=1e-4`; lists are separated by commas. `VOX_BACKEND` serves every section."""
    prefix = f"VOX_{kind.section.upper()}_"
    values: dict[str, _Variable] = {}
    if "backend" in kind.model_fields and environ.get("VOX_BACKEND"):
        values["backend"] = _Variable("VOX_BACKEND", environ["VOX_BACKEND"])
    for name, text in environ.items():
        if not name.startswith(prefix) or not text:
            continue
        field = name.removeprefix(prefix).lower()
        if field not in kind.model_fields:
            raise ConfigError(
                "C001",
                "unknown setting in the environment",
                where=name,
                faults=[_unknown(name, name, [prefix + f.upper() for f in kind.model_fields])],
                remedy="correct or unset it; `vox config schema` prints every key",
            )
        many = get_origin(kind.model_fields[field].annotation) is tuple
        values[field] = _Variable(name, tuple(text.split(",")) if many else text)
    return values


def _fault(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    said = origins.get(str(detail["loc"][0]).replace("-", "_"))
    what = f"{detail['msg'][0].lower()}{detail['msg'][1:]}"
    return f"{_kebab(key)} = {detail['input']!r}: {what}" + (f" (from {said})" if said else "")
