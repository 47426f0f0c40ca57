"""Evaluations of a model while it is trained: the core's hook `vox_evaluator`.

The core opens the trainer as a model, and what follows is `vox eval`. A folder may have another
evaluation: a run that was killed takes steps again, perhaps on another backend. It is replaced.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vox_core.api.files import JsonFault, read_json
from vox_core.api.generating import OpenModel
from vox_core.api.models import Observe
from vox_core.contract import Evaluator, Event, Notice
from vox_core.hookspecs import hookimpl
from vox_eval.evaluation import Stopped, decided_by, evaluate_opened
from vox_eval.scorecard import EVALUATION
from vox_eval.settings import EvalSettings
from vox_eval.suites import read_suites

PACE = 10.0
"""Seconds between the lines of progress that are shown."""


class SuiteEvaluator(Evaluator):
    """Evaluates on suites, which are read now.

    Raises:
        InputError: a fault of suites or rows.
    """

    def __init__(self, suites: Sequence[Path]) -> None:
        self._suite = read_suites(suites)

    def evaluate(
        self, model: object, folder: Path, emit: Observe, stop: Callable[[], bool]
    ) -> Mapping[str, float] | None:
        assert isinstance(model, OpenModel)
        decides = decided_by(model, self._suite)
        if _digest(folder) not in (None, decides["digest"]):
            emit(Notice(f"{folder} has an evaluation of another model, and is replaced"))
            shutil.rmtree(folder)
        try:
            done = evaluate_opened(model, self._suite, decides, folder, _paced(emit), stop)
        except Stopped:
            return None
        return {id: task.score for id, task in done.card.tasks.items()}


def _paced(observe: Observe) -> Observe:
    """Show one event in `PACE` seconds: a run has many evaluations."""
    shown = time.monotonic()

    def paced(event: Event) -> None:
        nonlocal shown
        if time.monotonic() - shown >= PACE:
            shown = time.monotonic()
            observe(event)

    return paced


def _digest(folder: Path) -> str | None:
    """Return the digest of the evaluation in a folder; None if there is none."""
    try:
        return str(read_json(folder / EVALUATION)["digest"])
    except (OSError, JsonFault, KeyError, TypeError):
        return None


@hookimpl
def vox_settings() -> type[EvalSettings]:
    return EvalSettings


@hookimpl
def vox_evaluator(suites: Sequence[Path]) -> Evaluator:
    """Return what evaluates on suites."""
    return SuiteEvaluator(suites)
