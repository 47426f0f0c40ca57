"""Tasks of reasoning-gym, with a stand-in for the package, which is large."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from vox_core.errors import DataError
from vox_objectives import gym


class Adding(list):
    """A task of integers; `ratio` is the score of an answer that is one off."""

    def __init__(self, size, seed, ratio=0.5):
        assert 0 <= ratio <= 1, "ratio must be between 0 and 1"
        self.ratio, answers = ratio, ["3", None]
        super().__init__(
            {
                "question": f"adding {seed + n}, {ratio}?",
                "answer": answers[n % 2],
                "metadata": {"output": (3,)},
            }
            for n in range(size)
        )

    def score_answer(self, answer, entry):
        """Raise for an answer that is no number, as some of reasoning-gym's verifiers do."""
        apart = abs(int(answer) - int(entry["answer"]))
        return {0: 1.0, 1: self.ratio}.get(apart, 0.0)


class Board(Adding):
    """Compares with a tuple, which is a list after JSON, as `arc_agi` does."""

    def score_answer(self, answer, entry):
        return 1.0 if (int(answer),) == entry["metadata"]["output"] else 0.05


class Broken(Adding):
    """Raises for every answer."""

    def score_answer(self, answer, entry):
        raise KeyError("rule")


@pytest.fixture(autouse=True)
def package(monkeypatch):
    made, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"adding": Adding, "board": Board, "broken": Broken}
    monkeypatch.setattr(gym.metadata, "version", lambda name: f"{name} 0.1.25")
    made.create_dataset = lambda name, **options: factory.DATASETS[name](**options)
    made.factory = factory
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


def test_the_fingerprint_has_the_installed_version():
    made = gym.open_task("gym:adding?size=1").fingerprint
    assert made == "reasoning-gym 0.1.25 adding {'size': 1, 'seed': 0}"


def test_an_option_may_be_a_fraction():
    (row,) = gym.open_task("gym:adding?size=1&ratio=0.25").rows
    assert row["prompt"] == "adding 0, 0.25?"


def test_the_verifier_has_the_options_of_the_task():
    (row,) = gym.open_task("gym:adding?size=1&ratio=0.25").rows
    assert gym.score(json.loads(json.dumps(row)), "4") == 0.25


@pytest.mark.parametrize(
    ("task", "found"),
    [("board", "a score of 0.05"), ("broken", "the verifier of 'broken' raised KeyError('rule')")],
)
def test_a_task_whose_own_answer_does_not_score_is_refused(task, found):
    with pytest.raises(DataError, match="does not accept a row's own answer") as caught:
        gym.open_task(f"gym:{task}?size=1")
    assert (caught.value.code, caught.value.found) == ("VOX-D014", found)


@pytest.mark.parametrize("options", ["ratio=2", "ratio=much", "level=3", "size"])
def test_a_wrong_option_is_refused(options):
    with pytest.raises(DataError) as caught:
        gym.open_task(f"gym:adding?{options}")
    assert caught.value.code == "VOX-D014"


def test_an_answer_that_the_verifier_cannot_read_is_wrong():
    (row,) = gym.open_task("gym:adding?size=1").rows
    assert gym.score(row, "I think it is three.") == 0.0


def test_a_row_of_which_no_answer_can_be_scored_is_refused():
    (row,) = gym.open_task("gym:adding?size=1").rows
    row["gym"]["entry"]["answer"] = "three"
    with pytest.raises(ValueError, match=r"the verifier of 'adding' raised ValueError"):
        gym.score(row, "?")


def test_another_row_is_refused():
    with pytest.raises(ValueError, match="no field `gym`"):
        gym.score({"prompt": "1 + 2?", "completion": "3"}, "3")
