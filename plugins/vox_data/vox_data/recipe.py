"""`mix.toml`: the recipe of a mixture, which `vox data mix` makes.

seed = 7
rows = 10000

[[source]]
path = "chat.jsonl"
weight = 0.7

[[source]]
path = "code.jsonl"
weight = 0.3
lane = "code"
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from vox_core.api.settings import Names, PositiveInt, Section, Seed, seen_from, settings_faults
from vox_core.errors import ConfigError

Word = Annotated[str, Field(min_length=1, pattern=r"^\S(.*\S)?$")]
Weight = Annotated[float, Field(gt=0)]


class MixSource(Section):
    """A file of rows."""

    section: ClassVar[str] = "source"

    path: Path = Field(
        description="Data file of any format that training reads, or folder with train.jsonl."
    )
    weight: Weight | None = Field(
        None, description="Share of the mixture, beside the other weights; all sources or none."
    )
    lane: Word | None = Field(None, description="Written into rows that name no lane.")
    cap: PositiveInt | None = Field(None, description="Most rows of this source.")
    repeat: bool = Field(False, description="Rows may be repeated to reach the weight.")
    lanes: Names = Field((), description="Take rows of these lanes alone.")
    categories: Names = Field((), description="Take rows of these categories alone.")
    min_rating: float | None = Field(
        None, description="Take rows rated so high, or higher, and none that are unrated."
    )


class MixRecipe(Section):
    """All of `mix.toml`."""

    section: ClassVar[str] = "mix"

    seed: Seed = Field(42, description="Seed of the draw and of the order.")
    rows: PositiveInt | None = Field(
        None, description="Rows of the mixture; without it as many as the weights allow."
    )
    malformed_rows: Literal["strict", "skip"] = Field(
        "strict", description="Refuse sources with malformed rows, or leave these rows out."
    )
    dedup: Literal["exact", "none"] = Field(
        "exact", description="Keep the first of rows that say the same, or all."
    )
    source: tuple[MixSource, ...] = Field(description="The sources, one table each.")

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if not self.source:
            raise ValueError("there is no [[source]]")
        weighted = [source.weight is not None for source in self.source]
        if any(weighted) and not all(weighted):
            number = weighted.index(False) + 1
            raise ValueError(f"[[source]] {number}: weight is missing, and other sources have one")
        if not any(weighted) and any(source.repeat for source in self.source):
            raise ValueError("repeat = true needs weights: without them each row is taken once")
        return self


def read_recipe(path: Path) -> MixRecipe:
    """The recipe in a file; its paths are as seen from the file's folder.

    Raises:
        ConfigError: C003, it cannot be read; C002, with everything that is wrong with it.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "C003",
            "the recipe of a mixture cannot be read",
            where=path,
            found=error.strerror if isinstance(error, OSError) else error,
            expected="a TOML file with a table [[source]] for each source",
            remedy="correct the file or its name; docs/guide/mixing.md shows one",
        ) from error
    if isinstance(table.get("source"), list):
        table["source"] = seen_from(path.parent, table["source"])
    try:
        return MixRecipe.model_validate(table)
    except ValidationError as error:
        raise ConfigError(
            "C002",
            "the recipe of a mixture is wrong",
            where=path,
            faults=settings_faults(MixRecipe, error),
            remedy="correct these lines; docs/guide/mixing.md shows every key",
        ) from error
