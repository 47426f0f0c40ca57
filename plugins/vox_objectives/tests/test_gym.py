"""Tasks of reasoning-gym, with a stand-in for the package, which is large."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from vox_core.errors import DataError
from vox_objectives import gym


def integers(answer, entry):
    """Raise for an answer that is no number, as some of reasoning-gym's verifiers do."""
    return 1.0 if int(answer) == int(entry["answer"]) else 0.0


@pytest.fixture(autouse=True)
def package(monkeypatch):
    made, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")

    def create_dataset(name, size, seed, ratio=0.5):
        assert 0 <= ratio <= 1, "ratio must be between 0 and 1"
        answers = ["3", None]
        return [
            {"question": f"{name} {seed + n}, {ratio}?", "answer": answers[n % 2], "metadata": {}}
            for n in range(size)
        ]

    made.__version__ = "0.0"
    made.create_dataset = create_dataset
    made.get_score_answer_fn = lambda name: {"adding": integers}[name]
    made.factory = factory
    factory.DATASETS = {"adding": None}
    monkeypatch.setitem(sys.modules, "reasoning_gym", made)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def test_a_row_keeps_its_entry_for_the_verifier():
    row, _ = gym.open_task("gym:adding?size=2&seed=7").rows
    assert (row["prompt"], row["completion"]) == ("adding 7, 0.5?", "3")
    assert gym.score(json.loads(json.dumps(row)), " 3\n") == 1.0


def test_a_task_without_a_single_answer_has_rows_all_the_same():
    *_, row = gym.open_task("gym:adding?size=2").rows
    assert row["completion"] == gym.NO_ANSWER
    assert row["gym"]["entry"]["answer"] is None


def test_an_option_may_be_a_fraction():
    (row,) = gym.open_task("gym:adding?size=1&ratio=0.25").rows
    assert row["prompt"] == "adding 0, 0.25?"


@pytest.mark.parametrize("options", ["ratio=2", "ratio=much", "level=3", "size"])
def test_a_wrong_option_is_refused(options):
    with pytest.raises(DataError) as caught:
        gym.open_task(f"gym:adding?{options}")
    assert caught.value.code == "VOX-D014"


def test_an_answer_that_the_verifier_cannot_read_is_wrong():
    (row,) = gym.open_task("gym:adding?size=1").rows
    assert gym.score(row, "I think it is three.") == 0.0


def test_another_row_is_refused():
    with pytest.raises(ValueError, match="no field `gym`"):
        gym.score({"prompt": "1 + 2?", "completion": "3"}, "3")
