"""Data with a weight: `--source PATH=WEIGHT`, or a table `[[data.source]]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


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


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str | dict | DataSource) else value


Sources = Annotated[
    tuple[Annotated[DataSource, BeforeValidator(_path_and_weight)], ...],
    BeforeValidator(_one_or_many),
]


def sources_seen_from(folder: Path, value: Any) -> list[Any]:
    """Resolve the paths in the `source` tables of a file in `folder`."""
    listed = value if isinstance(value, list) else [value]
    return [_seen_from(folder, one) for one in listed]


def _seen_from(folder: Path, value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        return {**value, "path": _seen_from(folder, value["path"])}
    local = isinstance(value, str) and not value.startswith("hf:")  # a data set of the hub
    return str(folder / value) if local else value
