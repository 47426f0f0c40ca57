"""`[data]`: which rows of the data are used, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from vox_core.config.source import Sources
from vox_core.config.values import Count, Names, Section, Share
from vox_core.contract import Curriculum, DataPolicy, Dedup, MalformedRows, Unrated

ROW_FIELDS = (
    "messages", "turns", "conversations", "system", "tools", "prompt", "instruction", "input",
    "completion", "response", "output", "text", "chosen", "rejected", "rating", "category",
    "difficulty", "lane", "response_mode", "task_family", "tags",
)  # fmt: skip
"""What vox looks for in a row."""


_ALSO = {"question": "prompt", "answer": "completion"}
"""Names that rows may have and a mapping has not, and those that it has."""


def _pairs(value: Any) -> Any:
    """`("prompt=question", …)`, as `--field` gives it, as a table.

    Raises:
        ValueError: one of them has no `=`.
    """
    if not isinstance(value, tuple):
        return value
    if wrong := [each for each in value if "=" not in each]:
        raise ValueError(f"found {wrong[0]}, expected NAME=PATH, such as prompt=question")
    return dict(each.split("=", 1) for each in value)


def _known(fields: Mapping[str, str]) -> Mapping[str, str]:
    """Raises:
    ValueError: a name that vox looks for in no row.
    """
    unknown = next((name for name in fields if name not in ROW_FIELDS), None)
    if unknown is not None:
        raise ValueError(f"{unknown} is no field of a row; {_meant(unknown, fields[unknown])}")
    return fields


def _meant(name: str, column: str) -> str:
    from difflib import get_close_matches

    if column in ROW_FIELDS:
        return f"vox's field stands first: did you mean {column}={name}?"
    near = [_ALSO[name]] if name in _ALSO else get_close_matches(name, ROW_FIELDS, n=1)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(ROW_FIELDS)}"


class DataSettings(Section):
    """What `vox train`, `vox plan` and `vox data` do to the rows before they are trained."""

    section: ClassVar[str] = "data"

    fields: Annotated[Mapping[str, str], BeforeValidator(_pairs), AfterValidator(_known)] = Field(
        {},
        description="Column or path that holds a field of the row: prompt=question, "
        "completion=meta.answers.0; an empty path leaves the field out. Repeatable; in vox.toml a "
        "table [data.fields].",
    )
    malformed_rows: MalformedRows = Field(
        "strict", description="A malformed row stops the run before it starts, or is skipped."
    )
    max_skipped: Share = Field(
        0.01, description="Greatest share of rows that may be skipped; more stop the run."
    )
    min_rating: float | None = Field(None, description="Only rows with this rating or a better.")
    unrated: Unrated | None = Field(
        None, description="What becomes of rows without a rating; --min-rating asks for it."
    )
    category: Names = Field((), description="Only rows of this category. Repeatable.")
    lane: Names = Field((), description="Only rows of this lane. Repeatable.")
    tag: Names = Field((), description="Only rows with this tag. Repeatable.")
    min_chars: Count = Field(0, description="Only rows that say at least so many characters.")
    max_chars: Count = Field(
        0, description="Only rows that say at most so many characters; 0: no limit."
    )
    dedup: Dedup = Field(
        "none", description="Leave out rows that say the same as an earlier one, or nearly."
    )
    near_threshold: Annotated[float, Field(ge=0.5, le=1)] = Field(
        0.8, description="Jaccard similarity from which --dedup near takes two rows for the same."
    )
    valid_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the rows to hold out, chosen by what they say."
    )
    source: Sources = Field(
        (), description="Data and its share of each epoch, in place of --data. Repeatable."
    )
    curriculum: Curriculum = Field(
        "none", description="Order of an epoch: random, or from easy rows to difficult ones."
    )

    def policy(self) -> DataPolicy:
        """What of these settings stands in the contract; what has no effect is left at zero."""
        skip, near = self.malformed_rows == "skip", self.dedup == "near"
        return DataPolicy(
            malformed_rows=self.malformed_rows,
            max_skipped=self.max_skipped if skip else 0.0,
            min_rating=self.min_rating,
            unrated=self.unrated,
            category=tuple(sorted({*self.category})),
            lane=tuple(sorted({*self.lane})),
            tag=tuple(sorted({*self.tag})),
            min_chars=self.min_chars,
            max_chars=self.max_chars,
            dedup=self.dedup,
            near_threshold=self.near_threshold if near else 0.0,
            valid_share=self.valid_share,
        )
