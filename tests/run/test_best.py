"""The best validation so far, and what telemetry tells of it after a resume."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from vox_core.contract import RunStart, Validation
from vox_core.run.best import Best, validations


def seen(*losses: float, patience: int = 0) -> Best:
    """Losses after steps 0, 1, 2, …"""
    return Best(patience, [Validation(step, loss) for step, loss in enumerate(losses)])


@pytest.mark.parametrize(
    ("losses", "step", "since"),
    [
        ((1.0,), None, 0),  # the base model's
        ((1.0, 3.0, 2.0), 2, 0),
        ((1.0, 2.0, 2.0), 1, 1),  # as good is not better
        ((1.0, math.nan, 2.0, math.inf), 2, 1),
        ((1.0, math.nan, math.nan), None, 2),
        ((1.0, 2.0, 3.0, 4.0, 1.9, 5.0), 4, 1),
    ],
)
def test_the_best_and_how_many_since(losses, step, since):
    best = seen(*losses)
    assert (best.step, best.since) == (step, since)


def test_patience():
    losses = (9.0, 2.0, 3.0, 3.0)
    assert not seen(*losses).exhausted
    assert not seen(*losses, patience=3).exhausted
    assert seen(*losses, patience=2).exhausted


def test_what_a_resume_took_back_is_forgotten(tmp_path):
    """Validations after 2, 4 and 6; from 5 on the run was taken again, with a validation each 5."""
    start = RunStart("run", "m", "cpu", "a CPU", "fp32", "0" * 64, 1, 20, 8, 99, 40)
    begun = {"event": "run_start", "time": 1.0, **asdict(start)}
    lines = [begun]
    lines += [{"event": "validation", "step": s, "loss": float(s)} for s in (0, 2, 4, 6)]
    lines += [{**begun, "first_step": 5}]
    # A backend's own events may have whatever fields they like.
    lines += [{"event": "mine", "first_step": first} for first in ("x", 0)]
    lines += [{"event": "validation", "step": s, "loss": None} for s in (5, 10)]
    path = tmp_path / "telemetry.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [v.step for v in validations(path, 10)] == [0, 2, 4, 5, 10]
    assert [v.step for v in validations(path, 5)] == [0, 2, 4, 5]
    assert math.isnan(validations(path, 5)[-1].loss)
    assert validations(tmp_path / "none.jsonl", 5) == []
