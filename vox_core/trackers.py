"""Trackers: the numbers of each event, and a new set of curves for each run.

A tracker's plugin has a class with the methods of `Curves`; its object is `Tracker(ThatClass)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from vox_core.contract import (
    CheckpointWritten,
    Evaluation,
    Event,
    ObjectiveMetrics,
    Outcome,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)
from vox_core.hookspecs import hookimpl


class Curves(Protocol):
    """A run in the tracker's own tool, from its first number or its resume until `close`."""

    def add(self, step: int, values: Mapping[str, float], /) -> None:
        """Write the numbers of a step by name. Steps need not come in order."""

    def close(self, outcome: Outcome, /) -> None:
        """Write the rest, and end the run there."""


class Tracker:
    """An observer that gives the numbers of one run after another to `Curves`.

    Args:
        curves: begins a run. It is called at the run's first number, so that a run that vox refuses
            leaves nothing.
        prepare: called at the start of each run, for what takes long, such as a library's import.
    """

    def __init__(
        self, curves: Callable[[RunStart], Curves], prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._begin, self._prepare = curves, prepare
        self._start: RunStart | None = None
        self._curves: Curves | None = None

    @hookimpl
    def vox_event(self, event: Event) -> None:
        """Write the numbers of an event."""
        if isinstance(event, RunStart):
            self._close("failed")
            self._start = event
            self._prepare()
        step, values = scalars(event)
        if values:
            assert self._start, "a number before the run"
            self._curves = self._curves or self._begin(self._start)
            self._curves.add(step, values)
        if isinstance(event, RunEnd):
            self._close(event.outcome)

    def _close(self, outcome: Outcome) -> None:
        curves, self._curves = self._curves, None
        if curves is not None:
            curves.close(outcome)


def scalars(event: Event) -> tuple[int, dict[str, float]]:
    """Return the step of an event, and name -> value; empty for one without numbers to draw."""
    match event:
        case StepDone(step=step):
            return step, _of_step(event)
        case ObjectiveMetrics(step=step, metrics=metrics):
            return step, {f"train/{name}": value for name, value in metrics.items()}
        case Validation(step=step, loss=loss, reward=None):
            return step, {"validation/loss": loss}
        case Validation(step=step, reward=float() as reward):
            return step, {"validation/reward": reward}
        case Evaluation(step=step, scores=scores):
            return step, dict(scores)
        case CheckpointWritten(step=step, seconds=seconds):
            return step, {"checkpoint/seconds": seconds}
    return 0, {}


def _of_step(step: StepDone) -> dict[str, float]:
    values = {
        "train/loss": step.loss,
        "train/learning_rate": step.lr,
        "train/gradient_norm": step.grad_norm,
        "train/trained_tokens": step.trained_tokens,
        "train/tokens_per_second": step.tokens / max(step.seconds, 1e-9),
    }
    if step.memory is not None:
        values["train/memory_bytes"] = step.memory
    return values
