"""Rows as an objective takes them: one document or several that belong together.

Supervised training makes one document of a row. An objective that compares makes several, its
sides, each a row of its own in a form of supervised training: the chosen and the rejected answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from vox_core.contract import SFT, Objective, ObjectiveSpec, Reward
from vox_core.data.faults import RowError
from vox_core.data.formats import place_of
from vox_core.data.json_rows import parse_object
from vox_core.data.rows import Record, parse_row, read_row
from vox_core.errors import BackendError, ConfigError
from vox_core.host.load import call_hook, format_error
from vox_core.host.provide import provider

Values: TypeAlias = Mapping[str, object]
Examples: TypeAlias = Callable[[Values, Callable[[], Values]], Mapping[str, Values]]
"""From a row, and what reads another one, to the row's sides, by label; ValueError if they cannot
be made."""
WHOLE = ""
"""Label of a row that is one document."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a data file, as the records of its documents.

    Args:
        sides: label -> record, in order; empty if the row does not fit.
        misfit: what the objective lacks in it.
    """

    source: Path
    line: int
    sides: Mapping[str, Record]
    misfit: str = ""

    @classmethod
    def of(cls, record: Record) -> Row:
        """A row that is one document."""
        return cls(record.source, record.line, {WHOLE: record})

    @property
    def place(self) -> str:
        return place_of(self.source, self.line)


def row_of(
    line: bytes | None,
    path: Path,
    number: int,
    examples: Examples | None = None,
    other: bytes | None = None,
) -> Row:
    """Read a line of a JSONL file.

    Args:
        examples: makes the sides of the row; None for supervised training.
        other: the line of another row, for an objective that looks at two; None: there is none.

    Raises:
        RowError: it is no row at all.
    """
    if examples is None:
        return Row.of(read_row(line, path, number))

    def beside() -> Values:
        if other is None:
            raise ValueError("found no other row, expected one to compare this one with")
        return parse_object(other)

    values = parse_object(line)
    try:
        made = examples(values, beside)
        sides = {label: parse_row(dict(side), path, number) for label, side in made.items()}
    except ValueError as error:
        return Row(path, number, {}, " ".join(str(error).split()))
    except (LookupError, TypeError) as error:  # of an objective that expects another row
        return Row(path, number, {}, format_error(error))
    except RowError as error:
        return Row(path, number, {}, "; ".join(map(str, error.faults)))
    return Row(path, number, sides)


@cache
def load_objective(name: str, options: tuple[tuple[str, str], ...] = ()) -> Objective:
    """Load an objective of a plugin, with its options checked.

    Raises:
        BackendError: B013, no plugin provides it.
        ConfigError: an option is unknown or wrong.
    """
    plugin = provider("objectives", name)
    objective = call_hook(plugin, "vox_objective", spec=ObjectiveSpec(name, dict(options)))
    if not isinstance(objective, Objective):
        raise _wrong_result(plugin.id, "vox_objective", objective, "an Objective")
    return objective


def load_reward(name: str) -> Reward:
    """Load a reward: a plugin's, by name, or `FILE.py:FUNCTION`.

    Raises:
        BackendError: B013, no plugin provides it.
        ConfigError: there is no such function.
    """
    if name.endswith(".py"):
        raise ConfigError(
            "C004",
            "a reward of a file needs the name of its function",
            where=f"--reward {name}",
            expected="FILE.py:FUNCTION",
            remedy=f"add it: --reward {name}:FUNCTION",
        )
    plugin = provider("rewards", "file" if ":" in name else name)
    reward = call_hook(plugin, "vox_reward", name=name)
    if not isinstance(reward, Reward):
        raise _wrong_result(plugin.id, "vox_reward", reward, "a Reward")
    return reward


def _wrong_result(plugin: str, hook: str, result: object, expected: str) -> BackendError:
    return BackendError(
        "B004",
        f"plugin {plugin!r} gave a wrong result from {hook}",
        found=f"an object of type {type(result).__name__}",
        expected=expected,
        remedy="upgrade the plugin, or report it to its authors",
    )


def objective_of(spec: ObjectiveSpec) -> Objective | None:
    """Return the objective of a contract; None for supervised training.

    Raises:
        InputError: as `load_objective`; options for supervised training, which has none.
    """
    if spec.name != SFT.name:
        return load_objective(spec.name, tuple(sorted(spec.options.items())))
    if spec.options:
        raise ConfigError(
            "C004",
            "supervised training has no options",
            where="--objective-option",
            found=", ".join(f"{name}={value}" for name, value in spec.options.items()),
            remedy="leave it out, or choose another --objective",
        )
    return None


def identity_of(spec: ObjectiveSpec) -> list[object]:
    """Return what decides the documents of a row: name, options and the plugin's version; the same
    for all objectives that learn from answers.

    Raises:
        InputError: as `load_objective`.
    """
    objective = objective_of(spec)
    if objective is None:
        return [SFT.name, [], None]
    if learns_from_answers(objective):
        return ["prompts", [], None]
    deciding = objective.options_of_examples
    options = [each for each in spec.options.items() if deciding is None or each[0] in deciding]
    plugin = provider("objectives", spec.name)
    return [spec.name, sorted(options), {plugin.id: plugin.shown_version}]


def learns_from_answers(objective: Objective | None) -> bool:
    """Whether the model answers prompts, and learns from its answers."""
    return objective is not None and "rollouts" in objective.needs


def examples_of(spec: ObjectiveSpec) -> Examples | None:
    """Return what makes the sides of a row; None for supervised training.

    Raises:
        InputError: as `load_objective`.
    """
    objective = objective_of(spec)
    if objective is None:
        return None
    return _prompted if learns_from_answers(objective) else examples_by(objective)


def _prompted(row: Values, _other: Callable[[], Values]) -> Mapping[str, Values]:
    """Return the row as one document, if it has a prompt and one answer; ValueError otherwise."""
    if (form := parse_row(dict(row)).form) in ("text", "preference"):
        raise ValueError(f"found a {form} row, expected a prompt with one answer, or messages")
    return {WHOLE: row}


def examples_by(objective: Objective) -> Examples:
    """Return what makes the sides of a row for an objective."""

    def examples(row: Values, other: Callable[[], Values]) -> Mapping[str, Values]:
        sides = dict(objective.examples(row))
        if "mismatched" in objective.needs:
            sides |= objective.mismatched(row, other())
        return sides

    return examples
