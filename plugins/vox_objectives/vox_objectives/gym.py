"""Tasks of reasoning-gym (arXiv:2505.24760) as rows, each with the entry that its verifier needs.

vox train --objective grpo --reward gym --data "gym:leg_counting?size=500&seed=1"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from urllib.parse import parse_qsl

from vox_core.contract import RowStream
from vox_core.errors import DataError

SIZE = 500
"""Rows of a task, unless it says otherwise."""
NO_ANSWER = "(no single answer)"
"""The completion of a row whose verifier accepts several answers and has no example of its own."""


def open_task(reference: str) -> RowStream:
    """Open `gym:NAME?OPTION=NUMBER&…`; options are those of the task, such as size and seed.

    Raises:
        DataError: D010, reasoning-gym is missing; D014, it has no such task or option.
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
        options = {key: _number(value) for key, value in parse_qsl(said, strict_parsing=bool(said))}
        task = reasoning_gym.create_dataset(name, **{"size": SIZE, "seed": 0, **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            "D014",
            f"the task {name!r} does not take these options",
            where=reference,
            found=str(error),
            expected="gym:NAME?size=500&seed=1, with options of the task",
            remedy="correct the options",
        ) from error
    return RowStream(_rows(name, task), fingerprint=f"{reasoning_gym.__version__} {name} {options}")


def score(row: Mapping[str, object], answer: str) -> float:
    """Return the verifier's score of an answer, from 0 to 1; 0 if the verifier raises, as that of
    `prime_factorization` does for an answer without numbers.

    Raises:
        ValueError: the row is not one of reasoning-gym.
    """
    from reasoning_gym import get_score_answer_fn

    match row.get("gym"):
        case {"task": str(task), "entry": Mapping() as entry}:
            verify = get_score_answer_fn(task)
        case _:
            raise ValueError("the row has no field `gym`; expected rows of --data gym:NAME")
    try:
        return float(verify(answer=answer.strip(), entry=entry))
    except Exception:  # noqa: BLE001 (verifiers parse the answer, and raise anything)
        return 0.0


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _rows(name: str, task: Iterator[Mapping[str, object]]) -> Iterator[dict[str, object]]:
    for entry in task:
        yield {
            "prompt": entry["question"],
            "completion": NO_ANSWER if entry["answer"] is None else entry["answer"],
            "gym": {"task": name, "entry": dict(entry)},
        }
