"""The sections of `vox.toml` other than `[train]` and `[data]`, and the whole file."""

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
    """Settings that generate, chat and merge share."""

    backend: str | None = Field(None, description="Use this backend only.")


class SamplingSettings(ModelUse):
    """Settings of generating answers."""

    adapter: str | None = Field(
        None, description="Another adapter folder, or `none` for the base model alone."
    )
    dtype: DTypeChoice = Field("auto", description="Compute dtype.")
    quant: Quant | None = Field(
        None, description="Quantisation of the base; by default that of the training run."
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


class ConvertSettings(Section):
    """`vox convert`."""

    section: ClassVar[str] = "convert"

    to: Literal["peft", "mlx"] | None = Field(None, description="Format to write.")
    model: str | None = Field(None, description="Base model, if not the one in the adapter.")
    out: Path | None = Field(None, description="Output folder.  [default: RUN-FORMAT]")


class PluginSettings(Section):
    """Settings of the catalog, blocked plugins and providers."""

    section: ClassVar[str] = "plugin"

    catalogs: Paths = Field((), description="Additional catalog files. Repeatable.")
    blocked: Names = Field((), description="Ids of plugins to ignore. Repeatable.")
    provider: Mapping[str, str] = Field(
        default_factory=dict,
        description='Plugin to use for a name that several provide: `"POINT.NAME" = "ID"`.',
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


SECTIONS: tuple[type[Section], ...] = tuple(
    type(field.default) for field in VoxToml.model_fields.values()
)


def toml_schema() -> dict[str, Any]:
    """Return the JSON schema of `vox.toml`, with each key in its home section only."""
    schema = VoxToml.model_json_schema()
    for kind in SECTIONS:
        keys = {kebab(name) for name in kind.own_fields()}
        table = schema["$defs"][kind.__name__]
        table["properties"] = {k: v for k, v in table.get("properties", {}).items() if k in keys}
    return schema
