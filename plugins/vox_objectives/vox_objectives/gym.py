"""Tasks of reasoning-gym (arXiv:2505.24760) as rows, each with the entry that its verifier needs.

vox train --objective grpo --reward gym --data "gym:leg_counting?size=500&seed=1"
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import metadata
from typing import Any
from urllib.parse import parse_qsl

from vox_core.contract import RowStream
from vox_core.errors import DataError

Row = Mapping[str, object]
SIZE = 500
"""Rows of a task, unless it says otherwise."""
NO_ANSWER = "(no single answer)"
"""The completion of a row whose verifier accepts several answers and has no example of its own."""


def open_task(reference: str) -> RowStream:
    """Open `gym:NAME?OPTION=NUMBER&…`; options are those of the task, such as size and seed.

    Raises:
        DataError: D010, reasoning-gym is missing; D014, it has no such task or option, or its
            verifier does not accept the first row's own answer.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(
            "D010",
            "reasoning-gym is not installed",
            where=reference,
            found=str(error),
            remedy="pip install 'vox-ml-objectives[gym]'",
        ) from error
    name, _, said = reference.removeprefix("gym:").partition("?")
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, 1)
        raise DataError(
            "D014",
            f"reasoning-gym has no task {name!r}",
            where=reference,
            expected=f"one of its {len(DATASETS)} tasks",
            remedy=f"did you mean gym:{near[0]}?" if near else "see reasoning-gym's gallery",
        )
    try:
        given = {key: _number(value) for key, value in parse_qsl(said, strict_parsing=bool(said))}
        options = {"size": SIZE, "seed": 0, **given}
        task = reasoning_gym.create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            "D014",
            f"the task {name!r} does not take these options",
            where=reference,
            found=str(error),
            expected="gym:NAME?size=500&seed=1, with options of the task",
            remedy="correct the options",
        ) from error
    if fault := next(map(_unscored, _rows(name, options, task)), ""):
        raise DataError(
            "D014",
            f"the verifier of {name!r} does not accept a row's own answer",
            where=reference,
            found=fault,
            expected="a score of 1",
            remedy="use another task",
        )
    version = metadata.version("reasoning-gym")  # `__version__` is older than the release
    return RowStream(_rows(name, options, task), fingerprint=f"{version} {name} {options}")


def score(row: Row, answer: str) -> float:
    """Return the verifier's score of an answer, from 0 to 1; 0 if the verifier raises, as that of
    `prime_factorization` does for an answer without numbers.

    Raises:
        ValueError: the row is not one of reasoning-gym, or its own answer raises as well.
    """
    match row.get("gym"):
        case {"task": str(task), "options": Mapping() as options, "entry": Mapping() as entry}:
            verify, own = _verifier(task, **options), entry.get("answer")
        case _:
            raise ValueError("the row has no field `gym`; expected rows of --data gym:NAME")
    try:
        return float(verify(answer=answer.strip(), entry=entry))
    except Exception as error:  # verifiers parse the answer, and raise anything
        if answer == own:
            raise ValueError(f"the verifier of {task!r} raised {error!r}") from error
    if own is not None:
        score(row, own)  # raises if no answer of this row can be scored
    return 0.0


def _number(text: str) -> int | float:
    return int(text) if text.removeprefix("-").isdigit() else float(text)


@cache
def _verifier(task: str, /, **options: float) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, **options).score_answer


def _unscored(row: Row) -> str:
    """Return how the verifier rejects a row's own answer after JSON; empty if it accepts it, or
    the row has none."""
    if row["completion"] == NO_ANSWER:
        return ""
    try:
        own = score(json.loads(json.dumps(row)), str(row["completion"]))
    except (TypeError, ValueError) as error:
        return str(error)
    return "" if own > 0.5 else f"a score of {own:g}"


def _rows(name: str, options: Row, task: Iterable[Row]) -> Iterator[dict[str, object]]:
    for entry in task:
        yield {
            "prompt": entry["question"],
            "completion": NO_ANSWER if entry["answer"] is None else entry["answer"],
            "gym": {"task": name, "options": options, "entry": dict(entry)},
        }
