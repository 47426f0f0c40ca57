"""`[data]`: which rows of the data are used, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vox_core.config.values import Section


def _path_and_weight(value: Any) -> Any:
    """`train.jsonl=0.7` as a table.

    Raises:
        ValueError: it says no weight.
    """
    if not isinstance(value, str):
        return value
    path, equals, weight = value.rpartition("=")
    if not equals or not path:
        raise ValueError("give a path and a weight, such as train.jsonl=0.7")
    return {"path": path, "weight": weight}


class DataSource(BaseModel):
    """Data files, and the share of training that is theirs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    path: Path = Field(description="As --data takes it.")
    weight: Annotated[float, Field(gt=0)] = Field(
        description="Share of the documents of an epoch, beside the other weights."
    )


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str | dict | DataSource) else value


Sources = Annotated[
    tuple[Annotated[DataSource, BeforeValidator(_path_and_weight)], ...],
    BeforeValidator(_one_or_many),
]


class DataSettings(Section):
    """What `vox train`, `vox plan` and `vox data` do to the rows before they are trained."""

    section: ClassVar[str] = "data"

    source: Sources = Field(
        (), description="Data and its share of each epoch, in place of --data. Repeatable."
    )
    curriculum: Literal["none", "difficulty"] = Field(
        "none", description="Order of an epoch: random, or from easy rows to difficult ones."
    )
