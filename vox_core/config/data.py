"""`[data]`: which rows of the data are used, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from vox_core.config.values import Section

ROW_FIELDS = (
    "messages", "turns", "conversations", "system", "tools", "prompt", "instruction", "input",
    "completion", "response", "output", "text", "chosen", "rejected", "rating", "category",
    "difficulty", "lane", "response_mode", "task_family", "tags",
)  # fmt: skip
"""What vox looks for in a row."""


def _known(fields: Mapping[str, str]) -> Mapping[str, str]:
    """Raises:
    ValueError: a name that vox looks for in no row.
    """
    if unknown := [name for name in fields if name not in ROW_FIELDS]:
        from difflib import get_close_matches

        near = get_close_matches(unknown[0], ROW_FIELDS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"it has {', '.join(ROW_FIELDS)}"
        raise ValueError(f"{unknown[0]} is no field of a row; {meant}")
    return fields


class DataSettings(Section):
    """What `vox train`, `vox plan` and `vox data` do to the rows before they are trained."""

    section: ClassVar[str] = "data"

    fields: Annotated[Mapping[str, str], AfterValidator(_known)] = Field(
        {},
        description="Where in a row stands what vox looks for: a table [data.fields] with "
        '`prompt = "question"`, a path such as `"meta.answers.0"`, or `""` to leave a field out.',
    )
