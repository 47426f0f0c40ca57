"""Scorers and teachers for `vox data generate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from vox_core.errors import ConfigError, TrainingError
from vox_scorers.checks import scorer_of
from vox_scorers.judge import teacher_completion


def test_a_scorer_is_a_function_of_row_and_answer() -> None:
    check = scorer_of({"name": "contains", "ignore-case": True}, Path())
    row = {"prompt": "Say it.", "ideal": ["Sun", 3]}
    assert check(row, "the sun") == (1, "containing 'Sun'")
    assert check(row, "moon")[0] == 0
    check.check(row)
    with pytest.raises(ConfigError, match="cannot judge a prompt"):
        check.check({"prompt": "Say it."})


def test_everything_that_decides_a_score_is_its_identity(tmp_path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    found = scorer_of({"name": "json-schema", "schema": "schema.json"}, tmp_path).identity
    assert found["options"] == {"schema": {"type": "integer"}}
    assert found["package"].startswith("vox-ml-scorers ")
    (tmp_path / "eval.jsonl").write_text('{"task": "t", "row": "r", "answer": "a"}')
    judge = {"name": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "against": "."}
    first = scorer_of(judge, tmp_path).identity
    (tmp_path / "eval.jsonl").write_text('{"task": "t", "row": "r", "answer": "b"}')
    assert scorer_of(judge, tmp_path).identity != first


def test_what_is_no_scorer_of_answers() -> None:
    for table in ({"name": "choice"}, {"name": "exakt"}, {"name": "exact", "x": 1}):
        with pytest.raises(ValueError, match="scorer"):
            scorer_of(table, Path())


def test_a_teacher_that_is_down() -> None:
    with pytest.raises(TrainingError, match="the teacher does not reply"):
        teacher_completion("http://127.0.0.1:1/v1", {}, sleep=lambda _: None)
