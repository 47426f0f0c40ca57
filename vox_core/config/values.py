"""Types of settings' values, such as data with a weight, and the base class of all sections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def _one_or_many(value: Any) -> Any:
    """Convert a single value to a list of one."""
    return (value,) if isinstance(value, str | Path | dict | DataSource) else value


def _seconds(value: Any) -> Any:
    """Convert `90m`, `2h`, `45s` or `1h30m` to seconds; numbers pass unchanged.

    Raises:
        ValueError: another text.
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
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_many)]
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


def is_duration(field: FieldInfo) -> bool:
    """Whether a setting takes durations such as 90m."""
    kinds = (each for each in field.metadata if isinstance(each, BeforeValidator))
    return any(each.func is _seconds for each in kinds)


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
    """Return the sections that define the fields of `kind`: its bases and itself."""
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
    """Convert `train.jsonl=0.7` to a table.

    Raises:
        ValueError: there is no weight.
    """
    if not isinstance(value, str):
        return value
    path, equals, weight = value.rpartition("=")
    if not equals or not path:
        raise ValueError("give a path and a weight, such as train.jsonl=0.7")
    return {"path": path, "weight": weight}


Sources = Annotated[
    tuple[Annotated[DataSource, BeforeValidator(_path_and_weight)], ...],
    BeforeValidator(_one_or_many),
]


def seen_from(folder: Path, value: Any) -> Any:
    """Resolve the paths in a file of `folder`: a text, those of a list, and `path` of a table; hub
    references stay."""
    if isinstance(value, list):
        return [seen_from(folder, one) for one in value]
    if isinstance(value, dict) and "path" in value:
        return {**value, "path": seen_from(folder, value["path"])}
    local = isinstance(value, str) and not value.startswith("hf:")
    return str(folder / value) if local else value
