"""`[data]`: data filters, column mapping, mixing and curriculum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from vox_core.config.values import Count, Names, Section, Share, Sources
from vox_core.contract import Curriculum, DataPolicy, Dedup, MalformedRows, Unrated
from vox_core.text import did_you_mean

ROW_FIELDS = (
    "messages", "turns", "conversations", "system", "tools", "prompt", "instruction", "input",
    "completion", "response", "output", "text", "chosen", "rejected", "rating", "category",
    "difficulty", "lane", "response_mode", "task_family", "tags",
)  # fmt: skip
"""Fields of a row that vox reads."""


_ALSO = {"question": "prompt", "answer": "completion"}
"""Aliases that a row may use but a mapping may not -> the field to map."""


def _pairs(value: Any) -> Any:
    """Convert `("prompt=question", …)`, the form of `--field`, to a table.

    Raises:
        ValueError: one of them has no `=`.
    """
    if not isinstance(value, tuple):
        return value
    if wrong := [each for each in value if "=" not in each]:
        raise ValueError(f"found {wrong[0]}, expected NAME=PATH, such as prompt=question")
    return dict(each.split("=", 1) for each in value)


def _known(fields: Mapping[str, str]) -> Mapping[str, str]:
    """Check the mapped fields.

    Raises:
        ValueError: a name is no field of a row.
    """
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
