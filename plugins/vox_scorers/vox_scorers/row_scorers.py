"""Scorers of the suites that ship, by the verifiers and constraints in their rows.

reasoning-gym  the verifier of a row's task
constraints    the answer keeps every constraint of its row
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic import Field

from vox_eval.scorer import (
    Example,
    Output,
    Score,
    Scorer,
    ScorerSpec,
    UnusableScorer,
    hookimpl,
    options,
)
from vox_scorers.suites import CONSTRAINTS, unmet


@options
class Gym(Scorer):
    """Score an answer with reasoning-gym's verifier, from 0 to 1; 0 if it raises.

    Args:
        verifiers: version of reasoning-gym.
    """

    binary: ClassVar[bool] = False
    verifiers: str = Field(default_factory=partial(version, "reasoning-gym"), init=False)

    def check(self, example: Example) -> None:
        if not isinstance(example.fields.get("gym"), Mapping):
            raise ValueError('no "gym", as the suite reasoning-gym:TASK has it')

    def score(self, example: Example, output: Output) -> Score:
        made: Any = example.fields["gym"]
        verify = _verifier(made["task"], tuple(sorted(made["options"].items())))
        try:
            return Score(float(verify(answer=output.text.strip(), entry=made["entry"])))
        except Exception as error:  # noqa: BLE001 - verifiers parse the answer, and raise anything
            return Score(0.0, f"the verifier raises {error!r}"[:200])


@cache
def _verifier(task: str, given: tuple[tuple[str, float], ...]) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, **dict(given)).score_answer


@options
class Constraints(Scorer):
    """The answer keeps every constraint in the row's `constraints`."""

    def check(self, example: Example) -> None:
        wanted = example.fields.get("constraints")
        if not isinstance(wanted, Mapping) or not wanted or not wanted.keys() <= CONSTRAINTS.keys():
            raise ValueError(f'no "constraints": an object of {", ".join(CONSTRAINTS)}')
        for name, value in wanted.items():
            usual = CONSTRAINTS[name][2][0]
            if usual is not None and type(value) is not type(usual):
                raise ValueError(f"{value!r} for the constraint {name!r}, such as {usual!r}")

    def score(self, example: Example, output: Output) -> Score:
        broken = unmet(output.text, example.fields["constraints"])
        return Score(float(not broken), f"breaks {', '.join(broken)}" if broken else "keeps all")


@hookimpl
def vox_scorer(spec: ScorerSpec) -> Scorer:
    """Return a scorer of this module."""
    if spec.name == "reasoning-gym" and find_spec("reasoning_gym") is None:
        raise UnusableScorer("scorer 'reasoning-gym': pip install reasoning-gym")
    kinds: dict[str, type[Scorer]] = {"reasoning-gym": Gym, "constraints": Constraints}
    return kinds[spec.name](**spec.options)
