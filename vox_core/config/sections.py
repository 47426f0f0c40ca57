"""The core's sections of `vox.toml`: its settings with their types and defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic.json_schema import models_json_schema

from vox_core.contract import (
    Curriculum,
    DataPolicy,
    Dedup,
    MalformedRows,
    Method,
    ObjectiveSpec,
    Quant,
    Schedule,
    Unrated,
)
from vox_core.text import did_you_mean

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def one_or_many(value: Any) -> Any:
    """Convert a single value to a list of one."""
    return value if isinstance(value, list | tuple) else (value,)


def _seconds(value: Any) -> Any:
    """Convert `90m`, `2h`, `45s` or `1h30m` to seconds; numbers pass unchanged."""
    text = value.strip().lower() if isinstance(value, str) else ""
    if not text or text.replace(".", "", 1).isdigit():
        return value
    if not (found := _DURATION.fullmatch(text)):
        raise ValueError("give a time such as 90m, 2h, 1h30m, or seconds")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + seconds


_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
Paths = Annotated[tuple[Path, ...], BeforeValidator(one_or_many)]
Names = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(one_or_many)]
PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0)]
Change = Literal[
    "clip", "dropout", "dtype", "epochs", "lr", "max-steps", "reward", "schedule", "valid",
    "warmup", "weight-decay",
]  # fmt: skip
"""What a resumed run may change: never model, rows, their order or the shape of the adapter."""


_dashed = BeforeValidator(lambda it: kebab(str(it)))
Changes = Annotated[tuple[Annotated[Change, _dashed], ...], BeforeValidator(one_or_many)]
DTypeChoice = Literal["auto", "bf16", "fp16", "fp32"]


def is_duration(field: FieldInfo) -> bool:
    """Whether a setting takes durations such as 90m."""
    return any(getattr(each, "func", None) is _seconds for each in field.metadata)


def kebab(name: str) -> str:
    return name.replace("_", "-")


def is_table(field: FieldInfo) -> bool:
    """Whether a setting is a table of `vox.toml`, which variables cannot express."""
    return get_origin(field.annotation) is Mapping


class Section(BaseModel):
    """Base class of all sections: frozen, kebab-case keys, unknown keys forbidden."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=kebab,
        populate_by_name=True,
        allow_inf_nan=False,
    )
    section: ClassVar[str]

    @classmethod
    def own_fields(cls) -> dict[str, FieldInfo]:
        """Return the fields that this section defines itself, not inherited ones."""
        known = {name for base in homes(cls) if base is not cls for name in base.model_fields}
        return {name: field for name, field in cls.model_fields.items() if name not in known}


def homes(kind: type[Section]) -> list[type[Section]]:
    """Return the sections that define the fields of `kind`: its bases, then itself."""
    bases = [base for base in reversed(kind.__mro__) if issubclass(base, Section)]
    return [base for base in bases if "section" in vars(base)]


class DataSource(BaseModel):
    """Data files and their weight in training."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    path: Path = Field(description="As --data takes it.")
    weight: Annotated[float, Field(gt=0)] = Field(
        description="Share of the documents of an epoch, beside the other weights."
    )


def _path_and_weight(value: Any) -> Any:
    """Convert `train.jsonl=0.7` to a table."""
    if not isinstance(value, str):
        return value
    path, equals, weight = value.rpartition("=")
    if not equals or not path:
        raise ValueError("give a path and a weight, such as train.jsonl=0.7")
    return {"path": path, "weight": weight}


Sources = Annotated[
    tuple[Annotated[DataSource, BeforeValidator(_path_and_weight)], ...],
    BeforeValidator(one_or_many),
]


_REWARD = re.compile(r"(?:(.+):)?([^:=]+)(?:=(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?))?")


class RewardSource(NamedTuple):
    """A reward as a setting names it: `NAME` of a plugin, or `FILE.py:FUNCTION`, with `=WEIGHT`
    behind it or 1."""

    file: Path | None
    name: str
    weight: float

    @classmethod
    def of(cls, text: object) -> RewardSource:
        found = _REWARD.fullmatch(text) if isinstance(text, str) else None
        if not (found and math.isfinite(float(found[3] or 1))) or found[2].endswith(".py"):
            raise ValueError("give NAME or FILE.py:FUNCTION; a weight stands behind it: exact=0.5")
        return cls(Path(found[1]) if found[1] else None, found[2], float(found[3] or 1))

    def __str__(self) -> str:
        source = f"{self.file}:{self.name}" if self.file else self.name
        return source if self.weight == 1 else f"{source}={self.weight!r}"


def _rewards(texts: tuple[Any, ...]) -> tuple[str, ...]:
    sources = {source.name: source for source in map(RewardSource.of, texts)}
    if len(sources) < len(texts):
        raise ValueError("two have one name; rename a function, or leave one out")
    return tuple(map(str, sources.values()))


RewardNames = Annotated[tuple[str, ...], BeforeValidator(_rewards), BeforeValidator(one_or_many)]


def seen_from(folder: Path, value: Any) -> Any:
    """Resolve the paths in a file of `folder`: a text, those of a list, and `path` of a table; hub
    references stay."""
    if isinstance(value, list):
        return [seen_from(folder, one) for one in value]
    if isinstance(value, dict) and "path" in value:
        return {**value, "path": seen_from(folder, value["path"])}
    local = isinstance(value, str) and not value.startswith("hf:")
    return str(folder / value) if local else value


ROW_FIELDS = (
    "messages", "turns", "conversations", "system", "tools", "prompt", "instruction", "input",
    "completion", "response", "output", "text", "chosen", "rejected", "rating", "category",
    "difficulty", "lane", "response_mode", "task_family", "tags",
)  # fmt: skip
"""Fields of a row that vox reads."""


_ALSO = {"question": "prompt", "answer": "completion"}
"""Aliases that a row may use but a mapping may not -> the field to map."""


def _pairs(value: Any) -> Any:
    """Convert `("prompt=question", …)`, the form of repeated flags, to a table of texts."""
    if isinstance(value, Mapping):
        return {key: str(each) for key, each in value.items()}
    if not isinstance(value, tuple):
        return value
    if wrong := [each for each in value if "=" not in each]:
        raise ValueError(f"found {wrong[0]}, expected NAME=VALUE")
    return dict(each.split("=", 1) for each in value)


def _known(fields: Mapping[str, str]) -> Mapping[str, str]:
    """Refuse a name that is no field of a row."""
    unknown = next((name for name in fields if name not in ROW_FIELDS), None)
    if unknown is not None:
        raise ValueError(f"{unknown} is no field of a row; {_meant(unknown, fields[unknown])}")
    return fields


def _meant(name: str, column: str) -> str:
    if column in ROW_FIELDS:
        return f"vox's field stands first: did you mean {column}={name}?"
    if name in _ALSO:
        return f"did you mean {_ALSO[name]}?"
    return did_you_mean(name, ROW_FIELDS) or f"it has {', '.join(ROW_FIELDS)}"


class DataSettings(Section):
    """Settings of reading, filtering and mixing rows, shared by `train`, `plan` and `data`."""

    section: ClassVar[str] = "data"

    fields: Annotated[Mapping[str, str], BeforeValidator(_pairs), AfterValidator(_known)] = Field(
        {},
        description="Read a field from another column or path: prompt=question, "
        "completion=meta.answers.0; an empty path drops the field. Repeatable; in vox.toml a "
        "table [data.fields].",
    )
    malformed_rows: MalformedRows = Field(
        "strict", description="Malformed rows: abort before training (strict), or skip them."
    )
    max_skipped: Share = Field(
        0.01, description="Abort if more than this fraction of rows would be skipped."
    )
    min_rating: float | None = Field(None, description="Keep rows with at least this rating.")
    unrated: Unrated | None = Field(
        None, description="Keep or drop rows without a rating; required with --min-rating."
    )
    category: Names = Field((), description="Keep rows of this category. Repeatable.")
    lane: Names = Field((), description="Keep rows whose `lane` field has this value. Repeatable.")
    tag: Names = Field((), description="Keep rows with this tag. Repeatable.")
    min_chars: Count = Field(0, description="Keep rows with at least this many characters of text.")
    max_chars: Count = Field(
        0, description="Keep rows with at most this many characters of text; 0: no limit."
    )
    dedup: Dedup = Field(
        "none", description="Drop rows whose text repeats an earlier one, exactly or nearly."
    )
    near_threshold: Annotated[float, Field(ge=0.5, le=1)] = Field(
        0.8, description="Jaccard similarity at which --dedup near drops a row."
    )
    valid_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Fraction of the rows to use for validation, chosen by their content."
    )
    source: Sources = Field(
        (), description="Data and its weight in each epoch, instead of --data. Repeatable."
    )
    curriculum: Curriculum = Field(
        "none", description="Order of the rows in an epoch: random, or from easy to difficult."
    )

    def policy(self) -> DataPolicy:
        """Return the data filters as the contract records them; settings without effect are
        zero."""
        values = {each.name: getattr(self, each.name) for each in fields(DataPolicy)}
        values |= {name: tuple(sorted({*values[name]})) for name in ("category", "lane", "tag")}
        if self.malformed_rows != "skip":
            values["max_skipped"] = 0.0
        if self.dedup != "near":
            values["near_threshold"] = 0.0
        return DataPolicy(**values)


DEFAULT_MODEL = "smollm2-135m"

LORA_LR, FULL_LR = 2e-4, 2e-5
"""Default peak learning rates of adapters and of the method `full`."""

_OF_ADAPTERS = ("adapter", "rank", "alpha", "dropout", "modules_to_save", "quant")
"""Settings that make no sense with the method `full`."""


class TrainSettings(DataSettings):
    """`vox train`."""

    section: ClassVar[str] = "train"

    model: str = Field(
        DEFAULT_MODEL, description="Base model: folder, hub id, GGUF file or catalog id."
    )
    revision: str | None = Field(None, description="Commit or tag of a hub model.")
    template: Path | Literal["chatml", "alpaca"] | None = Field(
        None,
        description="Chat template instead of the model's own: chatml, alpaca or a Jinja file.",
    )
    data: Paths = Field(
        (),
        description="Data file (JSONL, JSON, CSV, TSV, TXT, Parquet; .gz, .zst), folder with "
        "train.jsonl (and valid.jsonl), hf:owner/name, or - for JSONL from stdin. Repeatable.",
    )
    valid: Path | None = Field(
        None, description="Validation data file; --valid-share takes part of the rows instead."
    )
    out: Path | None = Field(None, description="Run folder to create.  [default: runs/MODEL-TIME]")
    backend: str | None = Field(None, description="Use this backend only.")
    dtype: DTypeChoice = Field("auto", description="Compute dtype of the base and the adapter.")
    quant: Quant = Field(
        "none", description="Quantisation of the base's linear layers; none: as stored."
    )
    adapter: str | None = Field(
        None,
        description="Start from this adapter: a run, a folder saved by PEFT or mlx-lm, or one on "
        "the hub (OWNER/NAME).",
    )
    method: Method = Field(
        "lora", description="Adapter type; full: train the model's own weights, without an adapter."
    )
    objective: str = Field(
        "sft",
        description="Training objective: sft, or an objective of a plugin, such as dpo, orpo, "
        "simpo, kto, grpo, ppo, distill. docs/guide/objectives.md compares them.",
    )
    objective_options: Annotated[Mapping[str, str], BeforeValidator(_pairs)] = Field(
        {},
        description="Setting of the objective: beta=0.1. Repeatable; in vox.toml a table "
        "[train.objective-options].",
    )
    reward: RewardNames = Field(
        (),
        description="Reward for sampled answers: exact, regex, numeric, json, python or "
        "FILE.py:FUNCTION. Repeatable: the sum counts, each times its weight (exact=0.5).",
    )
    teacher: str | None = Field(
        None, description="Teacher model or run for distillation; must have the same tokenizer."
    )
    rollouts: PositiveInt = Field(8, description="Sampled answers per prompt.")
    rollout_tokens: PositiveInt = Field(256, description="Max tokens of a sampled answer.")
    rollout_temperature: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Sampling temperature."
    )
    updates: PositiveInt = Field(1, description="Optimizer steps on the same sampled answers.")
    rank: PositiveInt = Field(16, description="Rank of the adapter.")
    alpha: Annotated[float, Field(gt=0)] = Field(
        32.0, description="LoRA alpha; the scale is alpha / rank."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Adapter dropout.")
    targets: Names = Field(
        ("all-linear",),
        description="Modules that get an adapter: all-linear, or names. With --method full: the "
        "linear modules to train, instead of every weight. Repeatable.",
    )
    modules_to_save: Names = Field(
        (), description="Modules trained in full, such as lm_head. Repeatable."
    )
    epochs: Annotated[float, Field(gt=0, le=1e6)] = Field(1.0, description="Passes over the data.")
    max_steps: Count = Field(0, description="Max optimizer steps; 0: set by --epochs.")
    batch_size: PositiveInt = Field(8, description="Examples per optimizer step.")
    micro_batch_tokens: PositiveInt = Field(
        2048, description="Max tokens per micro-batch. Affects memory and speed, not results."
    )
    tune: Literal["use", "refresh", "ignore"] = Field(
        "use",
        description="Fastest settings for this machine: use stored measurements, refresh them "
        "before training, or ignore them.",
    )
    tune_budget: Literal["minimal", "balanced", "full"] = Field(
        "balanced", description="Time limit of measuring: about 1, 5 or 20 minutes."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, slower."
    )
    seq_len: Annotated[int, Field(gt=1)] = Field(
        2048, description="Max tokens per example; longer ones are cut or split."
    )
    optimizer: Literal["adamw", "adamw-8bit"] = Field(
        "adamw", description="AdamW; adamw-8bit stores its state of large tensors in 8 bits."
    )
    lr: Annotated[float, Field(gt=0)] = Field(
        LORA_LR, description=f"Peak learning rate; with --method full {FULL_LR} by default."
    )
    schedule: Schedule = Field(
        "cosine", description="Schedule after warm-up; wsd falls in the last fifth of the steps."
    )
    warmup: Share = Field(0.03, description="Fraction of the steps that warm up the learning rate.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight decay of AdamW.")
    clip: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Gradient clipping (max global norm); 0 disables."
    )
    seed: Seed = Field(42, description="Seed of adapter weights, data order and dropout.")
    eval_every: Count = Field(
        0,
        description="Steps between validations and evaluations; 0: only before and after training.",
    )
    eval_suite: Paths = Field(
        (),
        description="Suite to evaluate on during training, as for `vox eval --suite` "
        "(plugin `eval`). Repeatable.",
    )
    save_every: Count = Field(100, description="Steps between checkpoints; 0: only at the end.")
    save_minutes: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Also save a checkpoint every so many minutes; 0 disables."
    )
    save_epochs: bool = Field(False, description="Also save a checkpoint after each epoch.")
    keep: PositiveInt = Field(2, description="Number of newest checkpoints to keep.")
    keep_every: Count = Field(
        0, description="Never delete checkpoints of multiples of this step; 0 disables."
    )
    max_time: Seconds = Field(
        0.0, description="Stop after this time and save: 90m, 2h or seconds; 0: no limit."
    )
    patience: Count = Field(
        0, description="Stop after this many validations without improvement; 0: never."
    )
    load_best_at_end: bool = Field(
        False, description="Write the result with the lowest validation loss, not the last."
    )
    max_bad_steps: PositiveInt = Field(
        3, description="Abort after this many consecutive steps with NaN or infinite values."
    )
    processes: PositiveInt = Field(
        1, description="Processes that share the work of each step, with the result of one process."
    )
    shard: bool = Field(
        False,
        description="Split the base model, or what --method full trains, among the processes "
        "(FSDP2): less memory, slower.",
    )
    launcher: str = Field("torchrun", description="Launcher that starts the processes.")
    max_restarts: Count = Field(
        3, description="Times that the launcher `ray` starts lost processes again."
    )
    resume: Path | Literal["auto"] | None = Field(
        None, description="Run folder to resume; auto: that of --out, or a new run."
    )
    allow_change: Changes = Field(
        (), description="Setting that may differ from the resumed run. Repeatable."
    )
    allow_cpu: bool = Field(False, description="Train on the CPU even if there is an accelerator.")
    allow_overcommit: bool = Field(
        False, description="Train even if predicted memory exceeds the device's."
    )

    @property
    def objective_spec(self) -> ObjectiveSpec:
        """The objective, as the contract records it."""
        return ObjectiveSpec(self.objective, dict(sorted(self.objective_options.items())))

    @model_validator(mode="after")
    def _data_of_sources(self) -> Self:
        """Set `data` to the paths of `source`."""
        paths = tuple(source.path for source in self.source)
        if paths and self.data not in ((), paths):
            raise ValueError("give data or source, not both; a source is data with a weight")
        if paths:
            self.__dict__["data"] = paths
            self.model_fields_set.add("data")
        return self

    @model_validator(mode="after")
    def _without_adapter(self) -> Self:
        """Set the defaults of the method `full`, and refuse settings of an adapter beside it."""
        if self.method != "full":
            if not self.targets:
                raise ValueError("an adapter needs targets: all-linear, or names of modules")
            return self
        if given := [name for name in _OF_ADAPTERS if name in self.model_fields_set]:
            names = ", ".join(f"--{kebab(name)}" for name in given)
            raise ValueError(f"method full trains no adapter: leave out {names}")
        for name, value in (("lr", FULL_LR), ("targets", ())):
            if name not in self.model_fields_set:
                self.__dict__[name] = value
        return self


class ModelUse(Section):
    """Settings that generate, chat and merge share."""

    backend: str | None = Field(None, description="Use this backend only.")


class LoadSettings(ModelUse):
    """Settings of loading a model to generate with."""

    dtype: DTypeChoice = Field("auto", description="Compute dtype.")
    quant: Quant | None = Field(
        None, description="Quantisation of the base; by default that of the training run."
    )


class SamplingSettings(LoadSettings):
    """Settings of generating answers."""

    adapter: str | None = Field(
        None, description="Another adapter folder, or `none` for the base model alone."
    )
    max_tokens: PositiveInt = Field(512, description="Max new tokens per answer.")
    temperature: Temperature = Field(0.0, description="Sampling temperature; 0 is greedy.")
    top_k: Count = Field(0, description="Keep the k most likely tokens; 0 keeps all.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Nucleus sampling: keep this probability mass."
    )
    min_p: Share = Field(
        0.0, description="Keep tokens with at least this probability relative to the top token."
    )
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Above 1: penalise tokens that occur in the prompt or the answer."
    )
    stop: Texts = Field((), description="End the answer before this text. Repeatable.")
    seed: Seed = Field(0, description="Seed of sampling.")
    system: str | None = Field(None, description="System message.")


class GenerateSettings(SamplingSettings):
    """`vox generate`."""

    section: ClassVar[str] = "generate"

    n: PositiveInt = Field(1, description="Number of answers; needs a temperature above 0.")


class ChatSettings(SamplingSettings):
    """`vox chat`."""

    section: ClassVar[str] = "chat"

    temperature: Temperature = Field(0.7, description="Sampling temperature; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(0.95, description="Nucleus sampling.")


class MergeSettings(ModelUse):
    """`vox merge`."""

    section: ClassVar[str] = "merge"

    model: str | None = Field(None, description="Base model, if not the one in the run.")
    out: Path | None = Field(None, description="Output folder.  [default: RUN-merged]")
    dtype: DTypeChoice = Field(
        "auto", description="Output dtype, the base's by default; fp32 avoids rounding."
    )
    onto: Literal["base", "trained-base"] = Field(
        "base",
        description="Weights to merge into: the base's own, or the dequantised ones that a "
        "quantised run trained on.",
    )
    quant: Literal["none", "affine4", "affine8", "mxfp4", "nvfp4"] = Field(
        "none", description="Quantise the merged linear layers, in MLX's format."
    )


class PluginSettings(Section):
    """Settings of the catalog, blocked plugins and providers."""

    section: ClassVar[str] = "plugin"

    catalogs: Paths = Field((), description="Additional catalog files. Repeatable.")
    blocked: Names = Field((), description="Ids of plugins to ignore. Repeatable.")
    provider: Mapping[str, str] = Field(
        default_factory=dict,
        description='Plugin to use for a name that several provide: `"POINT.NAME" = "ID"`.',
    )


SECTIONS: tuple[type[Section], ...] = (
    DataSettings, TrainSettings, GenerateSettings, ChatSettings, MergeSettings, PluginSettings,
)  # fmt: skip


def toml_schema(kinds: Sequence[type[Section]] = SECTIONS) -> dict[str, Any]:
    """Return the JSON schema of `vox.toml`, with each key in its home section only."""
    references, schema = models_json_schema([(kind, "validation") for kind in kinds])
    tables = {kind.section: references[kind, "validation"] for kind in kinds}
    for kind in kinds:
        table = schema["$defs"][tables[kind.section]["$ref"].rpartition("/")[2]]
        keys = {kebab(name) for name in kind.own_fields()}
        table["properties"] = {k: v for k, v in table.get("properties", {}).items() if k in keys}
    return {"type": "object", "additionalProperties": False, "properties": tables, **schema}
