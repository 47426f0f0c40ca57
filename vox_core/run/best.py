"""The best validation of a run, and how many have passed since.

Better is strictly lower; a loss that is not a number never is. The validation before the first step
does not count: it is the base model's.

Each checkpoint says what was known after its step, so a resumed run decides as the uninterrupted
one would have. Of a run that has ended the telemetry tells (`validations`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from vox_core.contract import RunStart, Validation
from vox_core.run import telemetry


class Best:
    """Follows validations.

    Args:
        patience: so many without a better one are enough; 0: there are never enough.

    Attributes:
        step, loss: of the best; None and infinity while there is none.
        since: validations after it.
    """

    def __init__(self, patience: int = 0, seen: Iterable[Validation] = ()) -> None:
        self.patience = patience
        self.step: int | None = None
        self.loss, self.since = math.inf, 0
        for validation in seen:
            self.see(validation)

    def see(self, validation: Validation) -> None:
        if not validation.step:
            return
        if validation.loss < self.loss:
            self.step, self.loss, self.since = validation.step, validation.loss, 0
        else:
            self.since += 1

    @property
    def exhausted(self) -> bool:
        """There have been as many without a better one as there should be."""
        return bool(self.patience) and self.since >= self.patience


def validations(path: Path, last: int) -> list[Validation]:
    """The validations of a run up to step `last`, as `telemetry.jsonl` has them.

    What was measured before a resume of steps that were then taken again is replaced.
    """
    found: dict[int, float] = {}
    for line in telemetry.read(path):
        if line["event"] == Validation.name:
            found[line["step"]] = math.nan if line["loss"] is None else line["loss"]
        elif line["event"] == RunStart.name:
            found = {step: loss for step, loss in found.items() if step < line["first_step"]}
    return [Validation(step, loss) for step, loss in sorted(found.items()) if step <= last]
