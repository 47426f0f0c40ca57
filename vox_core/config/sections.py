"""The sections of `vox.toml` beside `[train]` and `[data]`, and all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vox_core.config.data import DataSettings
from vox_core.config.train import TrainSettings
from vox_core.config.values import (
    Count,
    DTypeChoice,
    Names,
    Paths,
    PositiveInt,
    Section,
    Seed,
    Share,
    Temperature,
    Texts,
    kebab,
)
from vox_core.contract import Quant


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
    top_k: Count = Field(0, description="Keep the k likeliest tokens; 0 keeps all.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling.")
    min_p: Share = Field(
        0.0, description="Keep tokens at least this likely, relative to the likeliest."
    )
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Above 1: make tokens less likely that stand in prompt or answer."
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
    provider: Mapping[str, str] = Field(
        default_factory=dict,
        description='Which plugin provides a name that several do: `"POINT.NAME" = "ID"`.',
    )


class VoxToml(Section):
    """All of `vox.toml`."""

    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    generate: GenerateSettings = GenerateSettings()
    chat: ChatSettings = ChatSettings()
    merge: MergeSettings = MergeSettings()
    convert: ConvertSettings = ConvertSettings()
    plugin: PluginSettings = PluginSettings()


SECTIONS: tuple[type[Section], ...] = (
    DataSettings,
    TrainSettings,
    GenerateSettings,
    ChatSettings,
    MergeSettings,
    ConvertSettings,
    PluginSettings,
)


def toml_schema() -> dict[str, Any]:
    """The JSON schema of `vox.toml`: each key in the section that is its home."""
    schema = VoxToml.model_json_schema()
    for kind in SECTIONS:
        keys = {kebab(name) for name in kind.own_fields()}
        table = schema["$defs"][kind.__name__]
        table["properties"] = {k: v for k, v in table.get("properties", {}).items() if k in keys}
    return schema
