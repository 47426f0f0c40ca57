"""The recipe of `vox data generate`: prompts, who answers them how, and which answers are kept.

template = ["Write a question about {topic} for a pupil of {age}."]
seeds = "topics.jsonl"                # rows whose fields fill the templates
rows = 1000
near = 0.8

[values]                              # every combination with every seed row
age = [8, 12]

[sampling]
temperature = 0.7

[[check]]
scorer = { name = "regex" }           # with `ideal` of the seed row

[rating]
scorer = { name = "judge", url = "http://127.0.0.1:8000/v1", model = "m", rubric = "Is it clear?" }
least = 0.5
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationError

from vox_core.api.rows import RowError, open_source, parse_object, raw_lines, readable
from vox_core.api.settings import PositiveInt, Section, Seed, Temperature, Texts, settings_faults
from vox_core.errors import ConfigError, DataError

FILLED = re.compile(r"\{(\w+)\}")
"""A field of a template."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _has_name(table: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(table.get("name"), str):
        raise ValueError("name the scorer")
    return table


ScorerTable = Annotated[dict[str, Any], BeforeValidator(_has_name), BeforeValidator(_named)]
Count = Annotated[int, Field(ge=0)]


class Sampling(Section):
    """Sampling of answers."""

    section: ClassVar[str] = "sampling"

    max_tokens: PositiveInt = 512
    temperature: Temperature = 0.0
    seed: Seed = 0
    stop: Texts = ()


class TeacherTable(Section):
    """A teacher at an address."""

    section: ClassVar[str] = "teacher"

    model: str = ""
    api_key: str = "OPENAI_API_KEY"
    timeout: Annotated[float, Field(gt=0)] = 60.0


class Check(Section):
    """A scorer that an answer has to satisfy."""

    section: ClassVar[str] = "check"

    scorer: ScorerTable


class Rating(Section):
    """A scorer whose score is the row's rating."""

    section: ClassVar[str] = "rating"

    scorer: ScorerTable
    least: float = 0.0


class GenerateRecipe(Section):
    """All of a recipe."""

    section: ClassVar[str] = "recipe"

    template: Annotated[Texts, Field(min_length=1)]
    values: Mapping[str, Annotated[tuple[str | int | float, ...], Field(min_length=1)]] = {}
    seeds: Path | None = None
    system: str = ""
    rows: Count = 0
    seed: Seed = 0
    near: Annotated[float, Field(ge=0, le=1)] = 0.8
    sampling: Sampling = Sampling()
    teacher: TeacherTable = TeacherTable()
    check: tuple[Check, ...] = ()
    rating: Rating | None = None


def read_recipe(path: Path) -> GenerateRecipe:
    """Read a recipe.

    Raises:
        ConfigError: C010, with every fault of it.
    """
    try:
        return GenerateRecipe.model_validate(tomllib.loads(path.read_text("utf-8")))
    except ValidationError as error:
        faults = settings_faults(GenerateRecipe, error)
    except (OSError, ValueError, RecursionError) as error:
        faults = [f"it cannot be read: {error}"]
    raise _invalid(path, faults)


def _invalid(path: Path, faults: Sequence[str]) -> ConfigError:
    return ConfigError(
        "C010",
        "the recipe is invalid",
        where=path,
        faults=faults,
        remedy="correct the recipe; docs/guide/generating.md shows one",
    )


def seed_rows(recipe: GenerateRecipe, path: Path) -> list[dict[str, Any]]:
    """Return the seed rows, or a row without fields; every template finds its fields in each.

    Raises:
        DataError: D001, D002, D003, the file of seed rows.
        ConfigError: C010, a template has fields that neither rows nor values have.
    """
    rows = [{}] if recipe.seeds is None else _read(path.parent / recipe.seeds)
    wanted = {name for template in recipe.template for name in FILLED.findall(template)}
    faults = [
        f"no {name!r} for a template in row {number} of the seeds"
        for number, row in enumerate(rows, start=1)
        for name in sorted(wanted - row.keys() - recipe.values.keys())
    ]
    if faults:
        raise _invalid(path, faults[:20])
    return rows


def _read(path: Path) -> list[dict[str, Any]]:
    with readable(path):
        try:
            rows = [parse_object(line) for _, _, line in raw_lines(open_source(path).lines)]
        except RowError as error:
            raise DataError(
                "D003", "a seed row is malformed", where=path, found=error, remedy="correct it"
            ) from error
    if not rows:
        raise DataError("D002", "there are no seed rows", where=path, remedy="write rows to it")
    return rows
