"""What came of a run, for whoever started it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vox_core.run import outputs
from vox_core.run.ready import Ready
from vox_core.run.recorded import last_step


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What came of a run. Losses are None where nothing was measured.

    Args:
        seconds: from the first write to the last.
        startup_seconds: from the start of the command to the end of the first step.
        best_step, best_loss: the best validation after a step.
        adapter_step: the step whose adapter was written.
        rows: of one epoch.
        epochs: passes over them; None where --max-steps has set the length.
        warnings: those of this command, in order.
    """

    run: Path
    stopped: bool
    steps: int
    total_steps: int
    seconds: float
    startup_seconds: float | None
    loss: float | None
    valid_before: float | None
    valid_after: float | None
    best_step: int | None = None
    best_loss: float | None = None
    adapter_step: int | None = None
    rows: int | None = None
    epochs: float | None = None
    warnings: tuple[str, ...] = ()


def of_ended(ready: Ready) -> TrainReport:
    """Of a run that had finished before this command."""
    last = last_step(ready.run)
    before, after = outputs.held_out(ready.run, last)
    return TrainReport(
        run=ready.run.path,
        stopped=False,
        steps=last,
        total_steps=ready.prepared.plan.contract.total_steps,
        seconds=0.0,
        startup_seconds=None,
        loss=None,
        valid_before=before,
        valid_after=after,
    )
