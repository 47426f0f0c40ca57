"""Scorers for `vox data generate`, which checks and rates a teacher's answers with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vox_core.errors import ConfigError
from vox_eval.scorer import Example, Output, ScorerSpec, find_scorer


def scorer_of(
    table: Mapping[str, Any], folder: Path
) -> Callable[[Mapping[str, Any], str], tuple[float, str]]:
    """Return a scorer as a function of row and answer, which gives its score and its words.

    Args:
        table: its name and options, as in a suite.

    Raises:
        UnusableScorer: there is none of that name, or its options are wrong.
    """
    given = {key.replace("-", "_"): value for key, value in table.items() if key != "name"}
    scorer, _ = find_scorer(ScorerSpec(str(table["name"]), given, folder))
    if scorer.asks != "answer":
        raise ValueError(f"scorer {table['name']!r} scores no answers")

    def judged(row: Mapping[str, Any], answer: str) -> tuple[float, str]:
        ideal = row.get("ideal", [])
        texts = tuple(map(str, ideal if isinstance(ideal, list) else [ideal]))
        messages = [{"role": "user", "content": str(row["prompt"])}]
        example = Example("", row, messages, texts)
        try:
            scorer.check(example)
        except ValueError as error:
            raise ConfigError(
                "C010",
                f"scorer {table['name']!r} cannot judge a prompt of the recipe",
                found=error,
                remedy="give the seed rows what it needs, such as `ideal`",
            ) from error
        score = scorer.score(example, Output(answer, []))
        return score.value, score.why

    return judged
