"""Scorers for `vox data generate`, which checks and rates a teacher's answers with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_core.errors import ConfigError
from vox_eval.scorer import Example, Output, Scorer, ScorerSpec, find_scorer, options_of


@dataclass(frozen=True, slots=True)
class RowScorer:
    """A scorer of answers to the prompts of a recipe.

    Args:
        identity: everything of it that decides a score.
    """

    identity: Mapping[str, Any]
    scorer: Scorer

    def check(self, row: Mapping[str, Any]) -> None:
        """Refuse a prompt that cannot be judged, before any work.

        Raises:
            ConfigError: C010.
        """
        try:
            self.scorer.check(_example(row))
        except ValueError as error:
            raise ConfigError(
                "C010",
                f"scorer {self.identity['name']!r} cannot judge a prompt of the recipe",
                found=error,
                remedy="give the seed rows what it needs, such as `ideal`",
            ) from error

    def __call__(self, row: Mapping[str, Any], answer: str) -> tuple[float, str]:
        """Return the score of an answer, and why."""
        score = self.scorer.score(_example(row), Output(answer, []))
        return score.value, score.why


def scorer_of(table: Mapping[str, Any], folder: Path) -> RowScorer:
    """Return a scorer for the rows of a recipe.

    Args:
        table: its name and options, as in a suite.

    Raises:
        UnusableScorer: there is none of that name, or its options are wrong.
    """
    scorer, package = find_scorer(ScorerSpec.of(table, folder))
    if scorer.asks != "answer":
        raise ValueError(f"scorer {table['name']!r} scores no answers")
    identity = {"name": table["name"], "options": options_of(scorer), "package": package}
    return RowScorer(identity, scorer)


def _example(row: Mapping[str, Any]) -> Example:
    ideal = row.get("ideal", [])
    texts = tuple(map(str, ideal if isinstance(ideal, list) else [ideal]))
    return Example("", row, [{"role": "user", "content": str(row["prompt"])}], texts)
